"""Which layers are composites, and how a call of one is run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autoopt.capture import attention, recurrent
from autoopt.capture.composite import Composite
from autoopt.capture.distributed import active_group

Runner = Callable[..., Any]
"""(site, layer, *what the layer is called with) -> what it gives."""

RUNNERS: dict[type[nn.Module], Runner] = {
    nn.LSTM: recurrent.run,
    nn.GRU: recurrent.run,
    nn.RNN: recurrent.run,
    nn.LSTMCell: recurrent.run_cell,
    nn.GRUCell: recurrent.run_cell,
    nn.RNNCell: recurrent.run_cell,
    nn.MultiheadAttention: attention.run,
}


def runner_for(layer: type[nn.Module]) -> Runner | None:
    """That of the class whose forward a layer class runs: a subclass with its own forward has none."""
    return next((RUNNERS.get(cls) for cls in layer.__mro__ if "forward" in vars(cls)), None)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def run(site: Composite, *args: Any, **options: Any) -> Any:
    """The forward pass of an observed composite."""
    if any(leaf.numel() == 0 for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)):
        site.current.empty()  # it has nothing to tell
        return site.plain.forward(site.layer, *args, **options)
    site.current.group = active_group() or site.current.group
    runner: Any = site.prepare
    return runner(site, site.layer, *args, **options)
