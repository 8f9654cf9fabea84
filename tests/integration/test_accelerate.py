"""Accelerate: an automatic optimizer goes through `prepare()` like any other; nothing of ours is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoopt
from autoopt import AutoSGD
from contract.small import assert_same, mlp
from integration.agree import Run, assert_agree, either

accelerate = pytest.importorskip("accelerate", reason="needs the extra autoopt[hf]")

EPOCHS = 3


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def accelerator(accumulate: int = 1, precision: str = "no") -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(64, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4)


def epoch(runner: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """The loop from Accelerate's own guide."""
    for x, y in loader:
        with runner.accumulate(model):
            runner.backward(F.cross_entropy(model(x), y))
            runner.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def raw_loop(make: Any, every: int, dtype: torch.dtype | None) -> Run:
    model = mlp()
    optimizer = make(model)
    for _ in range(EPOCHS):
        batches = list(data())
        for start in range(0, len(batches), every):
            for x, y in batches[start : start + every]:
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    output = model(x)
                (F.cross_entropy(output.float(), y) / every).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


@either
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_it_does_what_the_raw_loop_does(make: Any, every: int, precision: str) -> None:
    runner, plain = accelerator(every, precision), mlp()
    model, optimizer, loader = runner.prepare(plain, make(plain), data())
    for _ in range(EPOCHS):
        epoch(runner, model, optimizer, loader)
    expected = raw_loop(make, every, torch.bfloat16 if precision == "bf16" else None)
    assert_agree((plain, optimizer), expected)
    assert not torch.equal(plain[0].weight, mlp()[0].weight)


@either
def test_a_saved_state_resumes_bit_by_bit(make: Any, tmp_path: Path) -> None:
    def prepared() -> tuple[Any, ...]:
        runner, plain = accelerator(), mlp()
        return runner, *runner.prepare(plain, make(plain), data())

    runner, model, optimizer, loader = prepared()
    for number in range(4):
        epoch(runner, model, optimizer, loader)
        if number == 1:
            runner.save_state(str(tmp_path / "half"))
    again, resumed, its_optimizer, its_loader = prepared()
    epoch(again, resumed, its_optimizer, its_loader)  # something to be overwritten
    again.load_state(str(tmp_path / "half"))
    for _ in range(2):
        epoch(again, resumed, its_optimizer, its_loader)
    assert_same(dict(model.state_dict()), dict(resumed.state_dict()))
    assert_same(optimizer.state_dict(), its_optimizer.state_dict())


def test_the_wrapper_can_be_watched() -> None:
    seen: list[int] = []

    class Recorder:
        def log(self, step: int, values: Any) -> None:
            seen.append(step)

    runner, plain = accelerator(), mlp()
    model, optimizer, loader = runner.prepare(plain, AutoSGD(plain), data())
    with autoopt.watch(optimizer, Recorder(), every=4):
        epoch(runner, model, optimizer, loader)
    epoch(runner, model, optimizer, loader)
    assert seen == [4, 8, 12, 16]
