"""Parameters that meet rows which were routed (`routes`).

What a sample adds to a parameter is the parameter's gradient from its rows alone, with the gradients of all others
zero. Nothing has to be read from the device for that.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autoopt.capture.copies import Sole, enter, once
from autoopt.capture.current import lowered
from autoopt.capture.ledger import Ledger
from autoopt.capture.routes import PRODUCTS, elementwise
from autoopt.capture.rowwise import Call
from autoopt.moments import Contributions

CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
LOWERED = PRODUCTS | {"conv1d", "conv2d", "conv3d"}  # autocast runs them in its lower precision
ROWWISE = nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Embedding, *CONVOLUTIONS  # one row after the other


def takes_rows(layer: Any) -> bool:
    """Whether `as_call` knows the layer."""
    return isinstance(layer, ROWWISE) and getattr(layer, "padding_mode", "zeros") == "zeros"


def as_call(layer: Any, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What a layer of one row after the other does to x."""
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm, (x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return F.rms_norm, (x, layer.normalized_shape, layer.weight, layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm, (x, layer.num_groups, layer.weight, layer.bias, layer.eps)
    if isinstance(layer, nn.Embedding):
        return F.embedding, (x, layer.weight, layer.padding_idx, layer.max_norm, layer.norm_type)
    for kind, convolve in CONVOLUTIONS.items():
        if isinstance(layer, kind):
            settings = layer.stride, layer.padding, layer.dilation, layer.groups
            return convolve, (x, layer.weight, layer.bias, *settings)
    return F.linear, (x, layer.weight, layer.bias)


def together(layer: Any) -> int:
    """How many of the last axes of its input such a layer needs for one row of its output."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return len(layer.normalized_shape)
    if isinstance(layer, nn.Embedding):
        return 0
    if isinstance(layer, nn.GroupNorm):
        return 2  # at least: the channels, and all places behind them
    return 1 + len(getattr(layer, "kernel_size", ()))


def rowwise(call: Call, owners: Tensor) -> bool:
    """Whether each row of the result is made of one row of what has these owners."""
    if call.in_place:
        return False
    if call.name == "__getitem__":  # a row of a parameter for each
        index = call.leaves[1]
        return 0 in call.derived and len(call.leaves) == 2 and isinstance(index, Tensor) and index.shape == owners.shape
    return (call.name in PRODUCTS and 0 in call.layouts) or elementwise(call.name)


class Scattered(torch.autograd.Function):
    """A call on parameters and rows, whose backward pass tells the ledger what each sample adds."""

    @staticmethod
    def forward(ctx: Any, call: Call, owners: Tensor, ledger: Ledger, sole: Sole, *tensors: Tensor) -> Tensor:
        places = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        leaves = list(call.leaves)
        with torch.enable_grad():
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor.detach().requires_grad_(tensor.requires_grad)
            output: Tensor = call.run(leaves)
        ctx.call, ctx.owners, ctx.ledger, ctx.sole, ctx.spent = call, owners, ledger, sole, False
        ctx.derived = call.leaves[min(call.derived)]
        ctx.places, ctx.leaves, ctx.output = places, leaves, output
        ctx.outer = torch._C._current_graph_task_id()
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        once(ctx)
        call, inner = ctx.call, [ctx.leaves[place] for place in ctx.places]
        asked = [tensor for tensor in inner if tensor.requires_grad]
        found = iter(torch.autograd.grad(ctx.output, asked, dy, retain_graph=True, allow_unused=True))
        gradients = [next(found) if tensor.requires_grad else None for tensor in inner]
        for place in call.derived:
            use = _contributions(ctx.output, ctx.leaves[place], dy, ctx.owners, call.samples)
            derived = call.leaves[place]
            enter(ctx.ledger, derived, call.samples, use, ctx.outer, sole=ctx.sole(derived))
        ctx.leaves = ctx.output = None
        return None, None, None, None, *gradients


def _contributions(output: Tensor, inner: Tensor, dy: Tensor, owners: Tensor, samples: int) -> Contributions:
    """What each sample adds to `inner`."""

    def of(sample: int) -> Tensor:
        rows = (owners == sample).view(*owners.shape, *[1] * (dy.dim() - owners.dim()))
        (c,) = torch.autograd.grad(output, inner, torch.where(rows, dy, 0), retain_graph=True)
        return c.to(dy.dtype)  # it is no more precise than that

    return lambda rows: torch.stack([of(sample) for sample in range(samples)[rows]])


def run(call: Call, owners: Tensor, ledger: Ledger, sole: Callable[[Tensor], bool]) -> Tensor:
    """The result of the call."""
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    if call.name in LOWERED:  # what autocast would do to them, done where autograd sees it
        tensors = [lowered(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
    output: Tensor = Scattered.apply(call, owners, ledger, sole, *tensors)  # type: ignore[no-untyped-call]
    return output
