"""Models in which the samples go a long way: exact against each sample alone, with the optimizers people use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam, AutoSGD
from equivalence.cases import assert_close

N = 5


class OwnGroupNorm(nn.GroupNorm):
    """With a forward pass of its own, so that the rule of nn.GroupNorm is not for it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class HalfNormed(nn.Module):
    """A part of a larger tensor, with gaps between its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 1), OwnGroupNorm(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split([4, 4], 1)
        return torch.cat([self.norm(a), b], 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a part with gaps": (HalfNormed, lambda: torch.randn(N, 3, 5, 5)),
}


def squares(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Σ_i c_i², each sample alone in a plain copy of the model."""
    plain = copy.deepcopy(model)
    found = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for i in range(len(x)):
        plain.zero_grad()
        plain(x[i : i + 1]).square().sum().backward()
        for name, p in plain.named_parameters():
            found[name] += 0 if p.grad is None else p.grad.square()
    return found


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str, make: Callable[..., Any]) -> None:
    make_model, inputs = MODELS[name]
    model, x = make_model().double(), inputs()
    x = x.double() if x.is_floating_point() else x
    expected = squares(model, x)
    optimizer = make(model, exact=True)
    source = optimizer._now.source
    for _ in range(3):
        optimizer.zero_grad()
        source.clear()
        model(x).square().sum().backward()
        for path, square in expected.items():
            found = source.second_moment(path)
            assert_close(found, square.sum() if found.dim() < square.dim() else square, 1e-10, path)
            assert source.samples(path) == N, path
    optimizer.step()
    optimizer.detach()
