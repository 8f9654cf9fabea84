"""Whole training runs of the three optimizers against the naive Algorithm 1, in float64."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD
from reference import NaiveAuto, contributions

STEPS = 20
KINDS: dict[str, Callable[..., Any]] = {
    kind: functools.partial(make, rule="paper")
    for kind, make in {"sgd": AutoSGD, "adam": AutoAdam, "adagrad": AutoAdaGrad}.items()
}
EPS: dict[str, dict[str, Any]] = {"sgd": {}, "adam": {"eps": 1e-6}, "adagrad": {"eps": 1e-6}}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"smoothing": 0.9},
    "unsmoothed": {"smoothing": 0.0, "lr": 0.01},
    "confident": {"smoothing": 0.5, "start": (0.0, 0.0), "lr": 0.02},
    "starting-momentum": {"smoothing": 0.9, "start": (0.5, 0.3), "lr": 0.1},
    "coupled-decay": {"smoothing": 0.9, "weight_decay": 0.1},
    "decoupled-decay": {"smoothing": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": True, "lr": 0.5},
    "layer": {"smoothing": 0.9, "granularity": "layer", "start": (0.5, 0.3), "lr": 0.1},
    "group": {"smoothing": 0.9, "granularity": "group", "weight_decay": 0.01},
    "every-fourth": {"smoothing": 0.9, "measure_every": 4, "weight_decay": 0.01},
    "every-third-layer": {"smoothing": 0.5, "measure_every": 3, "granularity": "layer", "start": (0.5, 0.3), "lr": 0.1},
}


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def mlp() -> nn.Sequential:
    # no bias before BatchNorm: its gradient is zero but for rounding, which Adam turns into steps of full length
    return nn.Sequential(
        nn.Linear(4, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Linear(6, 5),
        nn.LayerNorm(5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def wide() -> nn.Sequential:
    """Tensors of more elements than one would lay out in one row, and of exactly a power of two."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 17), nn.Tanh(), nn.Linear(17, 3)).double()


def batches(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Learnable, noisy, and of changing size."""
    result = []
    for samples, _ in zip(itertools.cycle((4, 5, 3)), range(STEPS), strict=False):
        x = torch.randn(samples, *shape, dtype=torch.float64)
        y = (x.flatten(1)[:, :3] + torch.randn(samples, 3, dtype=torch.float64)).argmax(1)
        result.append((x, y))
    return result


def loss_of(x: Tensor, y: Tensor, model: nn.Module) -> Tensor:
    return F.cross_entropy(model(x), y)


def run(kind: str, model: nn.Module, data: list[tuple[Tensor, Tensor]], **options: Any) -> list[dict[str, float]]:
    """Train with the library and with the naive reference side by side; returns the naive momenta of every step."""
    model_of_naive = copy.deepcopy(model)
    naive = NaiveAuto(dict(model.named_parameters()), kind, **options)
    optimizer = KINDS[kind](model, **options)
    momenta = []
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss_of(x, y, model).backward()
        optimizer.step()

        with torch.no_grad():
            for name, parameter in model_of_naive.named_parameters():
                parameter.copy_(naive.weights[name])
        naive.step(contributions(model_of_naive, partial(loss_of, x, y)))

        tuned = optimizer.tuned()
        assert tuned.keys() == naive.tuned.keys()
        for name, expected in naive.tuned.items():
            where = f"{name} at step {step}"
            assert tuned[name].lr == pytest.approx(expected.lr, rel=1e-9), where
            assert tuned[name].momentum == pytest.approx(expected.momentum, rel=1e-9, abs=1e-12), where
            assert tuned[name].noise == pytest.approx(expected.noise, rel=1e-9), where
            weight, wanted = model.get_parameter(name), naive.weights[name]
            assert (weight - wanted).abs().max() <= 1e-9 * wanted.abs().max(), where
        momenta.append({name: chosen.momentum for name, chosen in naive.tuned.items()})
    return momenta


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("kind", "extra"),
    [("sgd", {}), ("adam", {}), ("adam", {"amsgrad": True}), ("adagrad", {})],
    ids=["sgd", "adam", "amsgrad", "adagrad"],
)
def test_run_equals_the_naive_algorithm(kind: str, extra: dict[str, Any], option: str) -> None:
    run(kind, mlp(), batches((4,)), **OPTIONS[option], **EPS[kind], **extra)


@pytest.mark.parametrize("option", ["plain", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_run_of_a_convolutional_network(kind: str, option: str) -> None:
    run(kind, cnn(), batches((1, 5, 5)), **OPTIONS[option], **EPS[kind])


@pytest.mark.parametrize("option", ["plain", "decoupled-decay", "layer", "group"])
@pytest.mark.parametrize("kind", KINDS)
def test_run_of_a_wider_network(kind: str, option: str) -> None:
    run(kind, wide(), batches((8,)), **OPTIONS[option], **EPS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_solve_is_feasible_in_these_runs(kind: str) -> None:
    """So that the comparison above is not one of fallbacks alone."""
    momenta = run(kind, mlp(), batches((4,)), **OPTIONS["confident"], **EPS[kind])
    assert any(momentum > 0.01 for step in momenta for momentum in step.values())
