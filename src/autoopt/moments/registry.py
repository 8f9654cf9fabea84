"""Which layer has which rule."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autoopt.moments import conv, embedding, linear, norm
from autoopt.moments.operation import Operation

Prepare = Callable[[Any, Tensor], tuple[Operation, Tensor]]
"""(layer, input) -> the operation with the layer's constants bound, and its input, samples on the first axis."""

RULES: dict[type[nn.Module], Prepare] = {
    nn.Linear: linear.prepare,
    nn.Conv1d: conv.prepare,
    nn.Conv2d: conv.prepare,
    nn.Conv3d: conv.prepare,
    nn.Embedding: embedding.prepare,
    nn.LayerNorm: norm.prepare_layer_norm,
    nn.RMSNorm: norm.prepare_rms_norm,
    nn.GroupNorm: norm.prepare_group_norm,
    nn.modules.batchnorm._BatchNorm: norm.prepare_batch_norm,
}

COVERED = "Linear, Conv1d/2d/3d, Embedding, LayerNorm, RMSNorm, GroupNorm and BatchNorm1d/2d/3d"


def prepare_for(layer: type[nn.Module]) -> Prepare | None:
    """The rule for a layer class, that of the class whose forward it runs: a subclass with its own forward has none."""
    for cls in layer.__mro__:
        if "forward" in vars(cls):
            return RULES.get(cls)
    return None
