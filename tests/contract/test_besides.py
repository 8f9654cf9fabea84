"""What reaches a layer's parameter besides its layer: it is not among the samples, and is told of."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam, AutoSGD


def network() -> nn.Module:
    """With a bias whose gradient is nothing but rounding, before a norm of each sample and one over all."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(),
        nn.Conv2d(4, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Flatten(), nn.Linear(640, 3),
    )  # fmt: skip


def told(
    penalty: Callable[[nn.Module], Tensor | float] = lambda model: 0.0,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    make: Callable[..., Any] = AutoSGD,
    passes: int = 1,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[str]:
    """What three steps warn of."""
    model = network().to(dtype)
    prepare(model)
    optimizer = make(model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes):
                x, y = torch.randn(12, 2, 8, 8, dtype=dtype), torch.randint(0, 3, (12,))
                (F.cross_entropy(model(x), y) + penalty(model)).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def norms(model: nn.Module, weight: float) -> Tensor:
    return weight * torch.stack([p.square().sum() for p in model.parameters()]).sum()


every_way = pytest.mark.parametrize(
    ("make", "options"),
    [(AutoSGD, {}), (AutoSGD, {"exact": True}), (AutoAdam, {}), (AutoAdam, {"exact": True})],
    ids=["glance", "all", "elementwise", "all, elementwise"],
)


@every_way
@pytest.mark.parametrize("passes", [1, 2])
def test_a_penalty_in_the_loss_is_told_once(make: Any, options: dict[str, Any], passes: int) -> None:
    (words,) = told(lambda model: norms(model, 0.1), make=make, passes=passes, **options)
    assert "more) is not what the samples add to it through its layer" in words
    assert "weight_decay=" in words


@every_way
def test_so_is_a_hook_that_changes_a_gradient(make: Any, options: dict[str, Any]) -> None:
    def prune(model: nn.Module) -> None:
        mask = torch.rand(3, 640, generator=torch.Generator().manual_seed(1)) < 0.5
        model[7].weight.register_hook(lambda gradient: gradient * mask)

    (words,) = told(prepare=prune, make=make, **options)
    assert "'7.weight' is not what the samples add" in words


def test_so_is_a_use_outside_of_the_model() -> None:
    (words,) = told(lambda model: F.linear(torch.ones(5, 640), model[7].weight).square().mean())
    assert "'7.weight' is not" in words


@every_way
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nothing_is_told_of_a_loss_that_is_of_the_samples(
    make: Any, options: dict[str, Any], passes: int, dtype: torch.dtype
) -> None:
    assert told(make=make, passes=passes, dtype=dtype, **options) == []


def test_nor_of_a_penalty_that_hardly_matters() -> None:
    assert told(lambda model: norms(model, 1e-5)) == []
