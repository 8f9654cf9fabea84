"""The samples are followed through chains of operations, also where other axes are as long as the batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoopt.capture.layout import FOLDED, LOST, axis_of, folded, folds, follow

SIZES = (2, 3, 6)


def true_layout(ids: Tensor, samples: int) -> int:
    """From a tensor that holds the number of the sample at every place."""
    for axis, size in enumerate(ids.shape):
        shape = [samples if a == axis else 1 for a in range(ids.dim())]
        if size == samples and torch.equal(ids, torch.arange(samples).view(shape).expand_as(ids)):
            return axis
    for axis, size in enumerate(ids.shape):
        rows, rest = divmod(size, samples)
        whole = torch.arange(samples).repeat_interleave(rows) if rest == 0 else None
        if whole is not None and torch.equal(ids, whole.view(-1, *[1] * (ids.dim() - 1 - axis)).expand_as(ids)):
            return folded(axis)
    return LOST


def random_call(x: Tensor, draw: random.Random) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
    """An operation that moves axes, and its further arguments."""
    axes = list(range(x.dim()))
    kind = draw.choice(["permute", "transpose", "flatten", "unflatten", "unsqueeze", "select", "slice", "relu", "view"])
    if kind == "permute":
        return Tensor.permute, (draw.sample(axes, len(axes)),)
    if kind == "transpose":
        return torch.transpose, (draw.choice(axes), draw.choice(axes))
    if kind == "flatten" and x.dim() > 1:
        start = draw.randrange(x.dim() - 1)
        return torch.flatten, (start, start + 1)
    if kind == "unflatten":
        axis = draw.choice(axes)
        factors = [size for size in SIZES if x.shape[axis] % size == 0]
        if factors:
            return Tensor.unflatten, (axis, (draw.choice(factors), -1))
    if kind == "unsqueeze" and x.dim() < 6:
        return torch.unsqueeze, (draw.randrange(x.dim() + 1),)
    if kind == "select" and x.dim() > 1:
        axis = draw.choice(axes)
        return Tensor.__getitem__, ((*[slice(None)] * axis, draw.randrange(x.shape[axis])),)
    if kind == "slice":
        return Tensor.__getitem__, ((..., slice(0, draw.randrange(1, x.shape[-1] + 1))),)
    if kind == "view":
        return Tensor.reshape, (draw.sample(list(x.shape), x.dim()),)
    return torch.relu, ()


@pytest.mark.parametrize("samples", SIZES)
def test_random_chains(samples: int) -> None:
    """What is followed is where the samples are, or it is LOST; and it is lost only where they are on no axis."""
    draw, kept = random.Random(samples), 0
    for _ in range(400):
        shape = [samples, *draw.choices(SIZES, k=draw.randrange(1, 4))]
        x = torch.randn(shape)
        ids = torch.arange(samples).view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()
        layout = 0
        for _ in range(draw.randrange(1, 7)):
            func, more = random_call(x, draw)
            result, ids = func(x, *more), func(ids, *more)
            (layout,) = follow(func, (x, *more), {}, [(x, layout)], [result], samples)
            x = result
            assert layout in (LOST, true_layout(ids, samples)), f"{func.__name__}{more} gave {tuple(x.shape)}"
            kept += layout != LOST
    assert kept > 300


def test_a_layout_is_one_number() -> None:
    layouts = [*range(4), *map(folded, range(4))]
    assert len({*layouts, LOST}) == 9
    assert [axis_of(layout) for layout in layouts] == [0, 1, 2, 3] * 2
    assert [folds(layout) for layout in layouts] == [False] * 4 + [True] * 4
    assert folded(0) == FOLDED
    assert not folds(LOST)


def test_rows_that_change_places_on_any_axis_are_lost() -> None:
    x, order = torch.randn(3, 4, 5, 2), torch.randperm(4)
    calls: list[tuple[Callable[..., Tensor], tuple[object, ...]]] = [
        (Tensor.__getitem__, ((slice(None), order),)),
        (Tensor.__getitem__, ((..., order, slice(None), slice(None)),)),
        (Tensor.__getitem__, ((slice(None), None, [1, 0, 2, 3]),)),
        (torch.index_select, (1, order)),
        (torch.flip, ((1,),)),
        (torch.roll, (1, -3)),
    ]
    for func, more in calls:
        assert follow(func, (x, *more), {}, [(x, 1)], [func(x, *more)], 4) == [LOST]
        assert follow(func, (x, *more), {}, [(x, folded(1))], [func(x, *more)], 2) == [LOST]
    others: list[tuple[Callable[..., Tensor], tuple[object, ...]]] = [
        (Tensor.__getitem__, ((..., order, slice(None)),)),
        (torch.flip, ((2,),)),
        (torch.roll, (1, 0)),
    ]
    for func, more in others:
        assert follow(func, (x, *more), {}, [(x, 1)], [func(x, *more)], 4) == [1]


@pytest.mark.parametrize(
    ("equation", "shapes", "layouts", "expected"),
    [
        ("...ij,...jd->...id", [(4, 3, 5), (4, 5, 2)], [0, 0], 0),
        ("...ij,...jd->...id", [(4, 2, 3, 5), (2, 5, 2)], [0, None], 0),
        ("...ij,...jd->...id", [(2, 3, 5), (4, 2, 5, 2)], [None, 0], 0),
        ("...ij,...jd->...id", [(4, 3, 5), (2, 4, 5, 2)], [0, 1], 1),
        ("...ij,...jd->...id", [(2, 4, 3, 5), (2, 4, 5, 2)], [0, 1], LOST),
        ("... i, i ... -> ...", [(4, 3), (3, 4)], [0, 1], 0),
        ("h...d->...hd", [(2, 8, 3)], [folded(1)], FOLDED),
        ("...d->d", [(4, 3)], [0], LOST),
        ("...d", [(4, 3)], [0], LOST),
    ],
)
def test_an_ellipsis_stands_for_axes(
    equation: str, shapes: list[tuple[int, ...]], layouts: list[int | None], expected: int
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    sampled = [(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True) if layout is not None]
    result = torch.einsum(equation, *tensors)
    assert follow(torch.einsum, (equation, *tensors), {}, sampled, [result], 4) == [expected]
