"""Which layer has which rule."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autoopt.moments import activation, conv, embedding, linear, norm
from autoopt.moments.operation import Operation

Prepare = Callable[[Any, Tensor], tuple[Operation, Tensor]]
"""(layer, input) -> the operation with the layer's constants bound, and its input, samples on the first axis."""

RULES: dict[type[nn.Module], Prepare] = {
    nn.Linear: linear.prepare,
    nn.Conv1d: conv.prepare,
    nn.Conv2d: conv.prepare,
    nn.Conv3d: conv.prepare,
    nn.ConvTranspose1d: conv.prepare_transpose,
    nn.ConvTranspose2d: conv.prepare_transpose,
    nn.ConvTranspose3d: conv.prepare_transpose,
    nn.Embedding: embedding.prepare,
    nn.EmbeddingBag: embedding.prepare_bag,
    nn.LayerNorm: norm.prepare_layer_norm,
    nn.RMSNorm: norm.prepare_rms_norm,
    nn.GroupNorm: norm.prepare_group_norm,
    nn.modules.batchnorm._BatchNorm: norm.prepare_batch_norm,
    nn.modules.instancenorm._InstanceNorm: norm.prepare_instance_norm,
    nn.PReLU: activation.prepare,
}

FOREIGN: dict[str, Prepare] = {  # layers of libraries that are not imported here
    "transformers.pytorch_utils.Conv1D": linear.prepare_transposed,
}


def register(layer: type[nn.Module], prepare: Prepare) -> None:
    """Give a layer class, one that has a forward of its own, a rule."""
    RULES[layer] = prepare


def prepare_for(layer: type[nn.Module]) -> Prepare | None:
    """The rule for a layer class, that of the class whose forward it runs: a subclass with its own forward has none."""
    for cls in layer.__mro__:
        if "forward" in vars(cls):
            return RULES.get(cls) or FOREIGN.get(f"{cls.__module__}.{cls.__qualname__}")
    return None
