"""The small model and data that the contract tests train, and what it means that nothing changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD


def _with(kind: Any, rule: str) -> Any:
    make: Any = functools.partial(kind, rule=rule)
    make.__name__ = kind.__name__
    return make


OPTIMIZERS: list[Any] = [  # the others are in tests/trust
    _with(kind, rule) for rule in ("robust", "paper") for kind in (AutoSGD, AutoAdam, AutoAdaGrad)
]
_IDS = [f"{make.__name__}-{make.keywords['rule']}" for make in OPTIMIZERS]
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS, ids=_IDS)
robust = pytest.mark.parametrize("make", OPTIMIZERS[:3], ids=_IDS[:3])
of_the_paper = pytest.mark.parametrize("make", OPTIMIZERS[-3:], ids=_IDS[-3:])

Batch = tuple[Tensor, Tensor]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batches(count: int, samples: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    result = []
    for _ in range(count):
        x = torch.randn(samples, 4, generator=generator)
        y = (x[:, :3] + 0.5 * torch.randn(samples, 3, generator=generator)).argmax(1)
        result.append((x.to(dtype), y))
    return result


def backward(model: nn.Module, batch: Batch) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: Any, data: Iterable[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything a step may change."""
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}


def assert_same(a: Any, b: Any) -> None:
    """Equal bit for bit, a not-a-number included."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert ((a == b) | (a.isnan() & b.isnan())).all()
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
