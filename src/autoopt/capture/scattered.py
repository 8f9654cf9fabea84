"""Rows that were routed, as to the experts of a mixture: each belongs to one sample, but those of a sample lie apart.

Where they went is followed by a number for each row, that of its sample (`route`): the owners of a tensor, as many of
its leading axes as number rows. What a sample adds to a parameter is the parameter's gradient from its rows alone, with
the gradients of all others zero (`Scattered`). Nothing has to be read from the device for that.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autoopt.capture.copies import Sole, enter, once
from autoopt.capture.current import lowered
from autoopt.capture.ledger import Ledger
from autoopt.capture.rowwise import ELEMENTWISE, Call
from autoopt.moments import Contributions

Owners = list[Tensor | None]
"""Of each result; None: not known."""

PRODUCTS = {"linear", "matmul", "mm", "bmm", "__matmul__", "_grouped_mm", "grouped_mm", "grouped_mm_fallback"}
KEEPING = {  # every row as it is given
    "relu", "silu", "gelu", "tanh", "sigmoid", "softplus", "leaky_relu", "elu", "mish", "hardswish", "square", "exp",
    "dropout", "clamp", "neg", "abs", "sqrt", "rsqrt", "log", "sin", "cos", "erf", "gt", "lt", "ge", "le", "eq", "ne",
    "to", "type_as", "float", "half", "bfloat16", "double", "long", "int", "clone", "contiguous", "detach",
}  # fmt: skip


def _elementwise(name: str) -> bool:
    """Of functions, methods, and what operators call: mul, mul_, __rmul__, __imul__."""
    plain = name.strip("_")
    return any(one in ELEMENTWISE for one in (plain, plain.removeprefix("r"), plain.removeprefix("i")))


def keeps(name: str) -> bool:
    """Whether a call by that name gives every row as it was given one, whatever else it takes."""
    return name.strip("_") in KEEPING or _elementwise(name)


# Without parameters.


def route(name: str, args: Sequence[Any], kwargs: dict[str, Any], owners: Tensor, results: Sequence[Tensor]) -> Owners:
    """The owners of what a call made of its first argument, whose owners are given, and of others."""
    found = _routed(name, args, kwargs, owners, results)
    if len(found) != len(results):
        return [None] * len(results)
    return [o if o is not None and r.shape[: o.dim()] == o.shape else None for o, r in zip(found, results, strict=True)]


def _routed(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], owners: Tensor, results: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    x: Tensor = args[0]

    def given(place: int, key: str, default: Any = None) -> Any:
        return kwargs.get(key, args[place] if len(args) > place else default)

    def within(dim: Any) -> bool:
        """Whether an axis is none of those that number rows."""
        return type(dim) is int and dim % x.dim() >= owners.dim()

    match name:
        case "__getitem__":
            return [_indexed(args[1], owners, x.dim())]
        case "index_select" if type(given(1, "dim")) is int:
            dim = given(1, "dim") % x.dim()
            return [owners if within(dim) else owners.index_select(dim, given(2, "index"))]
        case "sort" | "argsort" if x.dim() == 1:
            return [owners[results[-1]]] * len(results)
        case "flip" | "roll" if owners.dim() == x.dim() == 1 or within(1):
            moved = getattr(owners, name)
            return [moved(0) if name == "flip" else moved(args[1], 0)] if args[-1] in (0, (0,), [0]) else []
        case "split" | "chunk" | "tensor_split" if len(args) > 1:
            return [owners] * len(results) if within(given(2, "dim", 0)) else getattr(owners, name)(args[1])
        case "softmax" | "log_softmax" | "sum" | "mean" | "amax" | "topk":
            return [owners] * len(results) if within(given(2 if name == "topk" else 1, "dim")) else []
        case "repeat_interleave" if given(2, "dim") == 0:
            return [owners.repeat_interleave(given(1, "repeats"))]
        case "repeat":
            times = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            return [owners.repeat(times[: owners.dim()])] if len(times) == x.dim() else []
        case "squeeze" | "unsqueeze" if type(given(1, "dim")) is int:
            at = given(1, "dim") % (x.dim() + (name == "unsqueeze"))
            return [getattr(owners, name)(at) if at < owners.dim() else owners]
        case "view" | "reshape" | "flatten" | "unflatten":
            return [_reshaped(owners, x.shape, results[0].shape)]
    return [owners] if keeps(name) or name in PRODUCTS else []


def _indexed(index: Any, owners: Tensor, dims: int) -> Tensor | None:
    """The owners of a part of a tensor of so many dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    if parts[0] is None:
        within = _indexed(parts[1:], owners, dims) if len(parts) > 1 else owners
        return None if within is None else within.unsqueeze(0)
    if parts[0] is Ellipsis:
        after = [part for part in parts[1:] if part is not None]
        return owners if len(after) <= dims - owners.dim() and not any(map(_masks, after)) else None
    if any(isinstance(part, list) or (isinstance(part, Tensor) and part.dim() > 1) for part in parts[1:]):
        return None
    first = parts[0]
    if _masks(first):
        owners = owners.view(*owners.shape, *[1] * max(0, first.dim() - owners.dim()))
        return owners.expand(first.shape)[first] if owners.dim() == first.dim() else None
    rows = parts[: owners.dim()]
    if any(part is None or part is Ellipsis or _masks(part) for part in rows):
        return None
    found: Tensor = owners[rows]
    return found if found.dim() else None


def _masks(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _reshaped(owners: Tensor, before: torch.Size, after: torch.Size) -> Tensor | None:
    """Where the rows stay whole."""
    of_one = math.prod(before[owners.dim() :])
    for axes in range(1, len(after) + 1):
        if math.prod(after[:axes]) == owners.numel() and math.prod(after[axes:]) == of_one:
            return owners.reshape(after[:axes])
    return None


def joined(owners: Owners, dim: int, result: Tensor) -> Tensor | None:
    """The owners of what `torch.cat` made of tensors that have these."""
    known = [one for one in owners if one is not None]
    if len(known) < len(owners) or any(one.dim() != known[0].dim() for one in known):
        return None
    if dim % result.dim() >= known[0].dim():
        return known[0]
    return torch.cat(known) if dim % result.dim() == 0 else None


def put_back(index: Any, owners: Tensor, before: Tensor | None, rows: int) -> Tensor | None:
    """The owners of a tensor to some rows of which others were written; nobody's, -1, if it had none `before`."""
    if not isinstance(index, Tensor) or index.dim() != 1 or owners.dim() != 1 or len(index) != len(owners):
        return None
    before = owners.new_full((rows,), -1) if before is None else before
    return before.index_copy(0, index, owners) if before.dim() == 1 else None


# With parameters.


def as_call(layer: Any, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What a layer of one row after the other does to x."""
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm, (x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return F.rms_norm, (x, layer.normalized_shape, layer.weight, layer.eps)
    return F.linear, (x, layer.weight, layer.bias)


def rowwise(call: Call, owners: Tensor) -> bool:
    """Whether each row of the result is made of one row of what has these owners."""
    if call.in_place:
        return False
    if call.name == "__getitem__":  # a row of a parameter for each
        index = call.leaves[1]
        return 0 in call.derived and len(call.leaves) == 2 and isinstance(index, Tensor) and index.shape == owners.shape
    return (call.name in PRODUCTS and 0 in call.layouts) or _elementwise(call.name)


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
    if call.name in PRODUCTS:  # what autocast would do to them, done where autograd sees it
        tensors = [lowered(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
    output: Tensor = Scattered.apply(call, owners, ledger, sole, *tensors)  # type: ignore[no-untyped-call]
    return output
