"""What a step on a CPU writes to is kept: it allocates nothing large, and nothing of one step enters the next."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from autoopt import AutoAdam, AutoGaussNewton, AutoNAdam, AutoRMSprop, AutoSGD
from autoopt.optim.bucket import Bucket
from autoopt_lab.memory import allocated
from contract.small import assert_same, backward, batches, mlp, snapshot, train
from trust.subjects import SUBJECTS

MAKES: list[Any] = [
    *SUBJECTS.values(),
    functools.partial(AutoSGD, weight_decay=0.1),
    functools.partial(AutoSGD, weight_decay=0.1, decoupled_weight_decay=True),
    functools.partial(AutoAdam, weight_decay=0.1),
    functools.partial(AutoAdam, amsgrad=True),
    functools.partial(AutoRMSprop, centered=True),
    functools.partial(AutoGaussNewton, weight_decay=0.1),
    functools.partial(AutoNAdam, weight_decay=0.1, rule="paper"),
]
IDS = [" ".join([make.func.__name__, *map(str, make.keywords.values())]) for make in MAKES]
every_make = pytest.mark.parametrize("make", MAKES, ids=IDS)


@every_make
def test_a_step_allocates_nothing_of_the_size_of_the_model(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    optimizer = make(model)
    *before, last = batches(3)
    train(model, optimizer, before)
    optimizer.zero_grad()
    backward(model, last)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert allocated(optimizer.step).peak < size / 10  # a few numbers for each row of 512


@every_make
def test_few_matrices_are_kept(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    kept = {name for bucket in optimizer._made_buckets()[0] for name in bucket._scratch}
    coupled = optimizer.defaults["weight_decay"] and not optimizer.defaults["decoupled_weight_decay"]
    assert len(kept) == (4 if optimizer.elementwise else 2) + bool(coupled)  # docs/benchmarks.md says so


@every_make
def test_no_step_reads_what_another_left(make: Any) -> None:
    ends = []
    for spoiled in (False, True):
        model = mlp()
        optimizer = make(model)
        for batch in batches(4):
            train(model, optimizer, [batch])
            for bucket in optimizer._made_buckets()[0]:
                for matrix in bucket._scratch.values() if spoiled else ():
                    matrix.fill_(torch.nan)
        ends.append(snapshot(model, optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@every_make
def test_no_name_stands_for_two_things_at_once(make: Any, groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a matrix of its own for every use a step is the same."""
    ends = []
    for fresh in (False, True):
        if fresh:
            monkeypatch.setattr(Bucket, "scratch", lambda b, _: torch.full(b.shape, torch.nan, dtype=b.compute))
        model = mlp()
        first, *rest = model.parameters()
        optimizer = make(model, param_groups=[{"params": [first]}, {"params": rest}] if groups else None)
        train(model, optimizer, batches(5))
        ends.append(snapshot(model, optimizer))
    assert_same(*ends)


def test_is_kept_for_steps_outside_of_inference_mode() -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    first, second, third = batches(3)
    train(model, optimizer, [first])
    optimizer.param_groups[0]["weight_decay"] = 0.1  # asks for one more
    optimizer.zero_grad()
    backward(model, second)
    with torch.inference_mode():
        optimizer.step()
    train(model, optimizer, [third])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
