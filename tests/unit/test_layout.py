"""The samples are followed through chains of operations, also where other axes are as long as the batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoopt.capture.layout import FOLDED, LOST, follow

SIZES = (2, 3, 6)


def true_layout(ids: Tensor, samples: int) -> int:
    """From a tensor that holds the number of the sample at every place."""
    for axis, size in enumerate(ids.shape):
        shape = [samples if a == axis else 1 for a in range(ids.dim())]
        if size == samples and torch.equal(ids, torch.arange(samples).view(shape).expand_as(ids)):
            return axis
    rows, rest = divmod(ids.shape[0], samples)
    whole = torch.arange(samples).repeat_interleave(rows) if rest == 0 else None
    if whole is not None and torch.equal(ids, whole.view(-1, *[1] * (ids.dim() - 1)).expand_as(ids)):
        return FOLDED
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
