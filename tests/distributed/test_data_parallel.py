"""DistributedDataParallel: the ranks stay bit-identical, and do what one process does with all the samples."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD
from ranks import on_ranks

OPTIMIZERS: dict[str, Any] = {
    "sgd": AutoSGD,
    "adam": AutoAdam,
    "adagrad": AutoAdaGrad,
    "every": functools.partial(AutoAdam, measure_every=4),
    "compiled": AutoAdam,
    "passes": functools.partial(AutoSGD, spread="passes"),
    "small": AutoSGD,  # inputs, of whose size each rank knows another figure
}
STEPS, SAMPLES, SMALL = 200, 12, 0.01


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return (SMALL if kind == "small" else 1) * x, x[:, :3].argmax(1)


def one_process(kind: str) -> nn.Module:
    model = network()
    optimizer = OPTIMIZERS[kind](model)
    for step in range(STEPS):
        x, y = batch(step, kind)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def in_passes(ranks: int) -> nn.Module:
    """One process that sees in turn what each rank would."""
    model = network()
    optimizer = AutoSGD(model, spread="passes")
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(part.chunk(ranks) for part in batch(step, "passes")), strict=True):
            (F.cross_entropy(model(x), y) / ranks).backward()
        optimizer.step()
    return model


def rank(number: int, ranks: int, folder: Path, kind: str, wrapped: bool, bad: bool) -> None:
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[kind](parallel if wrapped else model)
    step_once = optimizer.step
    if kind == "compiled":
        step_once = torch.compile(optimizer.step, fullgraph=True, backend="eager")  # type: ignore[method-assign]
    for step in range(STEPS):
        x, y = (part.chunk(ranks)[number] for part in batch(step, kind))
        if bad and step == 20 and number == 1:
            x = x * torch.inf
        optimizer.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)  # clips nothing: the factor must come out as one
        step_once()
    torch.save(model.state_dict(), folder / f"{number}.pt")


def run(ranks: int, kind: str, folder: Path, *, wrapped: bool, bad: bool = False) -> list[dict[str, Tensor]]:
    on_ranks(ranks, rank, folder, kind, wrapped, bad)
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(ranks)]


def assert_same_weights(found: dict[str, Tensor], alone: nn.Module) -> None:
    """To 1e-6 of the size of each tensor: float32, summed in another order. (Small inputs make weights of 45.)"""
    for name, weight in alone.state_dict().items():
        assert (found[name] - weight).norm() <= 1e-6 * weight.norm()


@pytest.mark.parametrize(
    ("kind", "ranks", "wrapped"),
    [
        *[("sgd", 2, True), ("adam", 4, False), ("adagrad", 2, False), ("every", 2, True)],
        *[("compiled", 2, True), ("small", 2, True)],
    ],
)
def test_ranks_agree_with_each_other_and_with_one_process(kind: str, ranks: int, wrapped: bool, tmp_path: Path) -> None:
    """Whether the optimizer was made from the model or from its DDP wrapper."""
    first, *others = run(ranks, kind, tmp_path, wrapped=wrapped)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert_same_weights(first, one_process(kind))


def test_the_spread_between_ranks_is_that_between_passes(tmp_path: Path) -> None:
    first, second = run(2, "passes", tmp_path, wrapped=True)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_same_weights(first, in_passes(2))


def test_a_bad_batch_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    first, second = run(2, "sgd", tmp_path, wrapped=True, bad=True)
    for name in first:
        assert first[name].isfinite().all()
        assert torch.equal(first[name], second[name])
