"""Where the samples lie in a tensor that was computed from a batch, followed from operation to operation.

A layout is the axis that numbers the samples; FOLDED, where consecutive rows of the first axis are one sample (windows,
heads); or LOST. Shapes alone cannot tell it when the batch is as large as another axis, so views are followed exactly.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

FOLDED, LOST = -1, -2

RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"}
VIEWS = {
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "select", "narrow", "unbind", "chunk",
    "split", "tensor_split", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "__getitem__", "__get__",
    "diagonal", "unfold", "flip",
}  # fmt: skip
MOVING = {  # along an axis, which is the argument of that number, or else this one
    "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "gather": (1, None), "take_along_dim": (2, None),
    "index_select": (1, None), "roll": (2, None),
}  # fmt: skip
PRODUCTS = {"matmul", "mm", "bmm", "einsum", "__matmul__", "__rmatmul__", "linear", "cdist", "addmm", "baddbmm"}


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
    if name in ("matmul", "mm", "__matmul__") and args[1].dim() <= 2:  # which sums over the rows of its right side
        sampled = [(tensor, layout) for tensor, layout in sampled if tensor is not args[1] or layout > 0]
    if not sampled or _moves_rows(name, args, kwargs, sampled, samples):
        return [LOST] * len(results)
    if name in VIEWS and sampled[0][0] is args[0] and sampled[0][1] != LOST and len(sampled) == 1:
        tensor, layout = sampled[0]
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args[1:], kwargs))):
            return _viewed(func, args, kwargs, tensor, layout, results, samples)
        if name == "__getitem__" and any(
            leaf.dtype == torch.bool for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)
        ):
            return [LOST] * len(results)
    return [carried(name, sampled, result, samples) for result in results]


def _moves_rows(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], sampled: Sequence[tuple[Tensor, int]], samples: int
) -> bool:
    """Whether rows of several samples, or of some more than once, may come to lie side by side on the first axis."""
    layout = next((layout for tensor, layout in sampled if args and tensor is args[0]), LOST)
    if layout not in (0, FOLDED):
        return False
    if name in MOVING:
        place, default = MOVING[name]
        dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
        along = dims if isinstance(dims, (tuple, list)) else [dims]
        return 0 in [dim % args[0].dim() for dim in along if dim is not None]
    if name != "__getitem__":
        return False
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    first = next((part for part in parts if part is not None), None)
    if not isinstance(first, Tensor) or first.dtype == torch.bool or first.dim() == 0:
        return False
    # as many rows as samples, by an index that does not depend on them: one of each, in some order
    each = layout == 0 and len(first) == samples and all(tensor is not first for tensor, _ in sampled)
    return not each


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
    axis = max(layout, 0)
    if layout >= 0 and all(list(t.shape).count(samples) == 1 for t in (tensor, *results)):
        return [list(result.shape).index(samples) for result in results]
    strides = [int(a == axis) for a in range(tensor.dim())]
    shown = func(torch.empty_strided(tensor.shape, strides, device="meta"), *args[1:], **kwargs)
    found = []
    for view, result in zip(tree_leaves(shown), results, strict=True):
        axes = [
            a for a in range(view.dim()) if view.stride(a) and view.shape[a] == result.shape[a] == tensor.shape[axis]
        ]
        place = axes[0] if len(axes) == 1 else LOST
        found.append(place if layout >= 0 or place == LOST else FOLDED if place == 0 else LOST)
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
    axis = max(layout, 0)
    for place in (axis, axis + result.dim() - tensor.dim()):  # broadcasting counts axes from the right
        if 0 <= place < result.dim() and result.shape[place] == tensor.shape[axis]:
            return place if layout >= 0 else FOLDED if place == 0 else LOST
    return LOST


def _reshaped(before: torch.Size, layout: int, after: torch.Size, samples: int) -> int:
    """Reshaping keeps the order of the elements, so a leading axis that is a multiple of N counts parts of samples."""
    if layout <= 0:
        if after[0] == samples:
            return 0
        return FOLDED if samples and after[0] % samples == 0 else LOST
    for place in range(len(after)):
        if after[place] == samples and math.prod(after[:place]) == math.prod(before[:layout]):
            return place
    return LOST
