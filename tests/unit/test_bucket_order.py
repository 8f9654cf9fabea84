"""Tensors whose elements lie in another order than their axes (channels last) are trained as all others are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autoopt import AutoAdam, AutoSGD
from autoopt.optim.bucket import Bucket


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Linear(64, 2))


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", [AutoSGD, AutoAdam])
@pytest.mark.parametrize("when", ["before", "between"])
def test_the_order_in_memory_changes_nothing(make: type, when: str) -> None:
    """Whether the optimizer knows of it from the start or not; and states go from one order to the other."""
    torch.manual_seed(0)
    plain = net().double()
    turned = copy.deepcopy(plain)
    if when == "before":
        turned.to(memory_format=torch.channels_last)
    first, second = make(plain), make(turned)
    for model, optimizer in ((plain, first), (turned, second)):
        train(model, optimizer, 0, 4)
    turned.to(memory_format=torch.channels_last)
    for model, optimizer in ((plain, first), (turned, second)):
        train(model, optimizer, 4, 8)
    other = copy.deepcopy(plain)
    for a, b in zip(turned.parameters(), other.parameters(), strict=True):
        b.data.copy_(a.data)
    third = make(other)
    third.load_state_dict(second.state_dict())
    train(plain, first, 8, 12)
    train(other, third, 8, 12)
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_rows_are_in_the_order_of_memory() -> None:
    """Then neither a gradient nor a weight has to be copied to be read row by row."""
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    bucket = Bucket([("w", weight, 0)], {}, ["estimate"], [{}])
    rows = bucket.rows([weight.detach()], "weights")
    assert torch.equal(rows.flatten()[:48], weight.detach().permute(0, 2, 3, 1).flatten())
    (view,) = bucket.tensors(rows)
    assert view.stride() == weight.stride()
    assert torch.equal(view, weight)


def test_a_model_that_is_turned_later_is_laid_out_anew() -> None:
    """Else every step would have to copy."""
    model = nn.Conv2d(3, 4, 2).double()
    optimizer = AutoSGD(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3, 4, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        model.to(memory_format=torch.channels_last)
    assert optimizer.state[model.weight]["estimate"].stride() == model.weight.stride()
