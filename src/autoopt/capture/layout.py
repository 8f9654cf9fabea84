"""Where the samples lie in a tensor that was computed from a batch, followed from operation to operation.

A layout is the axis that numbers the samples; FOLDED, where consecutive rows of the first axis are one sample (windows,
heads), or `folded(axis)`, where those of another one are; or LOST. Shapes alone cannot tell it when the batch is as
large as another axis, so views are followed exactly.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

FOLDED, LOST = -1, -2  # below them: folded on axis 1, 2, ...

RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"}
VIEWS = {
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "select", "narrow", "unbind", "chunk",
    "split", "tensor_split", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "__getitem__", "__get__",
    "diagonal", "unfold", "flip",
}  # fmt: skip
MOVING = {  # along an axis, the argument of that number, or else this one
    "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "gather": (1, 0), "take_along_dim": (2, 0),
    "index_select": (1, 0), "flip": (1, 0), "roll": (2, 0),
}  # fmt: skip
DEEPER = {"", "one_hot", "embedding", "diag_embed", "view_as_real", "view_as_complex"}  # behind the others; "": a layer
WRITING = {
    "index_copy", "index_add", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "put",
}  # fmt: skip
GROUPED = {f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)}
PRODUCTS = {"matmul", "mm", "bmm", "einsum", "__matmul__", "__rmatmul__", "linear", "cdist", "addmm", "baddbmm"}


def of_one(tensor: Tensor, layout: int) -> int:
    """The layout of a tensor that holds nothing but one sample: any axis of one row numbers it, and else all rows."""
    if layout >= 0 and tensor.shape[layout] == 1:
        return layout
    return next((axis for axis, length in enumerate(tensor.shape) if length == 1), FOLDED if tensor.dim() else LOST)


def folded(axis: int) -> int:
    """The layout of a tensor in which consecutive rows of that axis are one sample."""
    return FOLDED if axis == 0 else LOST - axis


def folds(layout: int) -> bool:
    """Whether a sample is several rows."""
    return layout < 0 and layout != LOST


def axis_of(layout: int) -> int:
    """The axis that a layout, if it is not LOST, speaks of."""
    return layout if layout >= 0 else 0 if layout == FOLDED else LOST - layout


def moved(layout: int, place: int) -> int:
    """The layout, where its axis came to another place."""
    return LOST if place == LOST else folded(place) if folds(layout) else place


def follow(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    sampled: Sequence[tuple[Tensor, int]],
    results: Sequence[Tensor],
    samples: int,
) -> list[int]:
    """The layouts of what an operation gave, from those of the tensors with samples that it took."""
    name = func.__name__
    if name in ("matmul", "mm", "__matmul__") and len(args) > 1 and args[1].dim() <= 2:  # sums over rows of its right
        sampled = [(tensor, layout) for tensor, layout in sampled if tensor is not args[1] or layout > 0]
    if not sampled or name.rstrip("_") in WRITING or _moves_rows(name, args, kwargs, sampled):
        return [LOST] * len(results)
    if name in GROUPED and _group_for_each(args, kwargs, sampled, samples):
        return [folded(1)]
    if name == "einsum" and isinstance(args[0], str):
        return [_summed(args[0], args[1:], sampled)]
    if name == "stack":
        new = kwargs.get("dim", args[1] if len(args) > 1 else 0) % results[0].dim()
        known = [(layout, axis_of(layout)) for _, layout in sampled]
        places = {LOST if layout == LOST else moved(layout, axis + (new <= axis)) for layout, axis in known}
        return [places.pop() if len(places) == 1 else LOST]
    if name in VIEWS and sampled[0][0] is args[0] and sampled[0][1] != LOST and len(sampled) == 1:
        tensor, layout = sampled[0]
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args[1:], kwargs))):
            return _viewed(func, args, kwargs, tensor, layout, results, samples)
        if name == "__getitem__" and any(
            leaf.dtype == torch.bool for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)
        ):
            return [LOST] * len(results)
    return [carried(name, sampled, result, samples) for result in results]


def _group_for_each(
    args: Sequence[Any], kwargs: dict[str, Any], sampled: Sequence[tuple[Tensor, int]], samples: int
) -> bool:
    """Whether a convolution of one image has channels of its own for each sample, and weights, if these are theirs."""
    places = {id(tensor): layout for tensor, layout in sampled}
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    of_weight = places.get(id(kwargs.get("weight", args[1] if len(args) > 1 else None)), 0)
    return bool(args) and places.get(id(args[0])) == folded(1) and groups % samples == 0 and of_weight in (0, FOLDED)


def _moves_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any], sampled: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether rows may come to lie on the axis of the samples in another order, or in other numbers."""
    if name == "embedding":
        return any(tensor is args[1] for tensor, _ in sampled)  # of a table that is made of samples
    layout = next((layout for tensor, layout in sampled if args and tensor is args[0]), LOST)
    if layout == LOST:
        return False
    axis = axis_of(layout)
    if name in MOVING:
        place, default = MOVING[name]
        given = kwargs.get("dim", kwargs.get("dims", args[place:] or default))
        return axis in [dim % args[0].dim() for dim in tree_leaves(given) if type(dim) is int]
    if name != "__getitem__":
        return False
    part = _part(args[1] if isinstance(args[1], tuple) else (args[1],), axis, args[0].dim())
    return isinstance(part, list) or (isinstance(part, Tensor) and part.dim() > 0)


def _part(parts: Sequence[Any], axis: int, dims: int) -> Any:
    """What an index into a tensor of so many dimensions says of an axis."""
    taken = [
        0 if part is None or part is Ellipsis else part.dim() if getattr(part, "dtype", None) == torch.bool else 1
        for part in parts
    ]
    place = 0
    for part, axes in zip(parts, taken, strict=True):
        place += dims - sum(taken) if part is Ellipsis else axes
        if axis < place:
            return part
    return None


def _summed(equation: str, operands: Sequence[Any], sampled: Sequence[tuple[Tensor, int]]) -> int:
    """The layout of what torch.einsum gave: the letters tell."""
    left, _, result = equation.replace(" ", "").partition("->")
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    layouts = {id(tensor): layout for tensor, layout in sampled}
    terms, places = left.split(","), set()
    more = [tensor.dim() - len(term) + 3 if "." in term else 0 for term, tensor in zip(terms, given, strict=True)]
    result = _spelled(result, max(more))
    for term, tensor, axes in zip(terms, given, more, strict=True):
        layout = layouts.get(id(tensor))
        if layout is None:
            continue
        term = _spelled(term, axes)
        if layout == LOST or "->" not in equation or term[axis_of(layout)] not in result:
            return LOST
        places.add(moved(layout, result.index(term[axis_of(layout)])))
    return places.pop() if len(places) == 1 else LOST


def _spelled(term: str, axes: int) -> str:
    """A term with a letter for each axis that its ellipsis stands for: the last ones of two are the same."""
    return term.replace("...", "".join(chr(0x3B1 + axis) for axis in reversed(range(axes))))


def _viewed(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensor: Tensor,
    layout: int,
    results: Sequence[Tensor],
    samples: int,
) -> list[int]:
    """A view of a tensor that steps along its sample axis alone shows where that axis went."""
    axis = axis_of(layout)
    whole = all(result.numel() >= tensor.numel() for result in results)
    if whole and layout >= 0 and all(list(t.shape).count(samples) == 1 for t in (tensor, *results)):
        return [list(result.shape).index(samples) for result in results]
    strides = [int(a == axis) for a in range(tensor.dim())]
    shown = func(torch.empty_strided(tensor.shape, strides, device="meta"), *args[1:], **kwargs)
    found = []
    for view, result in zip(tree_leaves(shown), results, strict=True):
        axes = [
            a for a in range(view.dim()) if view.stride(a) and view.shape[a] == result.shape[a] == tensor.shape[axis]
        ]
        found.append(moved(layout, axes[0] if len(axes) == 1 else LOST))
    return found


def carried(name: str, sampled: Sequence[tuple[Tensor, int]], result: Tensor, samples: int) -> int:
    """The layout of what a function, not a view, made of tensors with samples."""
    places = {_kept(name, tensor, layout, result, samples) for tensor, layout in sampled} - {LOST}
    if len(places) == 1:
        return places.pop()
    return 0 if 0 in places and name in PRODUCTS else LOST  # the rows of the left, where both sides number samples


def _kept(name: str, tensor: Tensor, layout: int, result: Tensor, samples: int) -> int:
    if layout == LOST or result.dim() == 0:
        return LOST
    if name in RESHAPES:
        return _reshaped(tensor.shape, layout, result.shape, samples)
    axis = axis_of(layout)
    if layout < LOST and name in PRODUCTS and axis >= tensor.dim() - 2:  # it may be what is summed over
        return LOST
    possible = {axis} if name in DEEPER else {axis, axis + result.dim() - tensor.dim()}  # broadcasting adds in front
    places = [p for p in possible if 0 <= p < result.dim() and result.shape[p] == tensor.shape[axis]]
    return moved(layout, places[0] if len(places) == 1 else LOST)


def _reshaped(before: torch.Size, layout: int, after: torch.Size, samples: int) -> int:
    """Reshaping keeps the order of the elements, so an axis that has as much before it counts parts of samples."""
    outer = math.prod(before[: axis_of(layout)])
    for place, length in enumerate(after):
        if length and length % samples == 0 and math.prod(after[:place]) == outer:
            return place if length == samples else folded(place)
    return LOST
