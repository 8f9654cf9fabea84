"""What users of torch.optim expect: schedulers, groups, closures, granularity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from autoopt import AutoSGD
from contract.small import (
    assert_same,
    backward,
    batches,
    every_optimizer,
    mlp,
    moved,
    of_the_paper,
    snapshot,
    train,
    weights,
)

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 1.0, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=8, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], o
    ),
}


def test_no_scheduler_is_forgotten() -> None:
    known = {
        name
        for name, kind in vars(schedulers).items()
        if isinstance(kind, type) and issubclass(kind, schedulers.LRScheduler) and not name.startswith("_")
    }
    assert set(SCHEDULERS) == known - {"LRScheduler"}


def scheduled(optimizer: Any, model: nn.Module, name: str) -> list[float]:
    """Seven steps under a scheduler; returns the lr of each."""
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for batch in batches(7):
        rates.append(optimizer.param_groups[0]["lr"])
        train(model, optimizer, [batch])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    return rates


@every_optimizer
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(make: Any, name: str) -> None:
    plain = mlp()
    expected = scheduled(torch.optim.SGD(plain.parameters(), lr=1.0), plain, name)
    model = mlp()
    optimizer = make(model)
    rates = scheduled(optimizer, model, name)
    assert rates == expected
    assert len(set(rates)) > 1
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@every_optimizer
def test_lr_scales_the_step(make: Any) -> None:
    """From the same state, half the lr gives half the change, and `tuned` shows the rate in force."""
    (batch,) = batches(1)
    changes, rates = [], []
    for lr in (1.0, 0.5):
        model = mlp(torch.float64)
        before = weights(model)
        optimizer = make(model, lr=lr)
        train(model, optimizer, [(batch[0].double(), batch[1])])
        changes.append({name: w - before[name] for name, w in weights(model).items()})
        rates.append(optimizer.tuned())
    for name, change in changes[0].items():
        torch.testing.assert_close(changes[1][name], change / 2, rtol=1e-9, atol=1e-15)
        assert rates[1][name].lr == pytest.approx(rates[0][name].lr / 2)
        assert rates[1][name].momentum == rates[0][name].momentum
        assert rates[1][name].noise == rates[0][name].noise


@every_optimizer
def test_lr_of_zero_leaves_everything_alone(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    before = snapshot(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, batches(2))
    optimizer.param_groups[0]["lr"] = 1.0
    assert_same(snapshot(model, optimizer), before)


@every_optimizer
def test_groups_have_their_own_options(make: Any) -> None:
    model = mlp()
    head = {"params": model[3].parameters(), "lr": 0.0}
    optimizer = make(model, param_groups=[{"params": model[0].parameters(), "granularity": "layer"}, head], lr=0.5)
    before = weights(model)
    train(model, optimizer, batches(2))
    assert moved(model, before) == {"0.weight", "0.bias"}  # the norm is in no group, the head's lr is 0
    tuned = optimizer.tuned()
    assert tuned["0.weight"] == tuned["0.bias"]
    assert 0 < tuned["0.weight"].lr < 1
    assert tuned["3.weight"].lr == 0


@every_optimizer
def test_add_param_group(make: Any) -> None:
    model = mlp()
    optimizer = make(model, param_groups=[{"params": model[0].parameters()}])
    train(model, optimizer, batches(2))
    before = weights(model)
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.5})
    train(model, optimizer, batches(2))
    assert moved(model, before) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.param_groups[1]["smoothing"] == optimizer.param_groups[0]["smoothing"]
    assert optimizer.tuned().keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}


@every_optimizer
def test_adding_a_group_keeps_what_the_others_learned(make: Any) -> None:
    model = mlp()
    optimizer = make(model, param_groups=[{"params": model[0].parameters()}])
    train(model, optimizer, batches(3))
    before = optimizer.tuned()
    optimizer.add_param_group({"params": model[3].parameters()})
    assert {name: optimizer.tuned()[name] for name in before} == before


@every_optimizer
@pytest.mark.parametrize(("granularity", "different"), [("tensor", 6), ("layer", 3), ("group", 1)])
def test_granularity(make: Any, granularity: str, different: int) -> None:
    model = mlp()
    optimizer = make(model, granularity=granularity, smoothing=0.5)
    train(model, optimizer, batches(3))
    tuned = optimizer.tuned()
    assert list(tuned) == [name for name, _ in model.named_parameters()]
    assert len({chosen.noise for chosen in tuned.values()}) == different
    if granularity == "layer":
        assert tuned["0.weight"] == tuned["0.bias"]


@every_optimizer
def test_tuned_before_and_after_the_first_step_by_either_rule(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    if make.keywords["rule"] == "robust":
        assert {(chosen.lr, chosen.momentum) for chosen in optimizer.tuned().values()} == {(0.0, 0.9)}
    assert all(chosen.noise != chosen.noise for chosen in optimizer.tuned().values())  # not a number: not measured
    train(model, optimizer, batches(1))
    for chosen in optimizer.tuned().values():
        assert [type(x) for x in (chosen.lr, chosen.momentum, chosen.noise)] == [float] * 3
        assert chosen.lr > 0
        assert 0 <= chosen.momentum < 1
        assert chosen.noise >= 0


@of_the_paper
def test_tuned_before_and_after_the_first_step(make: Any) -> None:
    model = mlp()
    optimizer = make(model, start=(0.75, 0.1))
    for chosen in optimizer.tuned().values():
        assert (chosen.lr, chosen.momentum) == pytest.approx((0.25, 0.4))
        assert chosen.noise != chosen.noise  # not a number: nothing was measured
    train(model, optimizer, batches(1))
    for chosen in optimizer.tuned().values():
        assert [type(x) for x in (chosen.lr, chosen.momentum, chosen.noise)] == [float] * 3
        assert 0.001 <= chosen.lr <= 1
        assert 0 <= chosen.momentum < 1
        assert chosen.noise >= 0


@every_optimizer
@pytest.mark.parametrize("returns", [True, False])
def test_closure(make: Any, returns: bool) -> None:
    data = batches(3)
    plain, model = mlp(), mlp()
    train(plain, make(plain), data)
    optimizer = make(model)
    for batch in data:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = backward(model, batch)
            return loss if returns else None

        result = optimizer.step(closure)
        assert (result is not None) == returns
        assert not returns or result.requires_grad
    assert_same(weights(model), weights(plain))


def test_step_hooks_run() -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, batches(1))
    assert calls == ["before", "after"]


@every_optimizer
def test_accumulation_equals_one_large_batch(make: Any) -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    whole, parts = mlp(torch.float64), mlp(torch.float64)
    optimizer = make(whole)
    nn.functional.cross_entropy(whole(x), y, reduction="sum").backward()
    optimizer.step()
    accumulating = make(parts)
    for i in (0, 2, 5):
        rows = slice(i, {0: 2, 2: 5, 5: 6}[i])
        nn.functional.cross_entropy(parts(x[rows]), y[rows], reduction="sum").backward()
    accumulating.step()
    for name, weight in weights(whole).items():
        torch.testing.assert_close(parts.get_parameter(name).detach(), weight, rtol=1e-12, atol=1e-14)
    for name, chosen in optimizer.tuned().items():
        assert accumulating.tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9)


@every_optimizer
def test_accumulation_of_single_samples(make: Any) -> None:
    """Each micro-batch alone has no spread; together they have."""
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randint(3, (4,))
    whole, parts = mlp(torch.float64), mlp(torch.float64)
    optimizer, accumulating = make(whole), make(parts)
    nn.functional.cross_entropy(whole(x), y, reduction="sum").backward()
    optimizer.step()
    for i in range(4):
        nn.functional.cross_entropy(parts(x[i : i + 1]), y[i : i + 1], reduction="sum").backward()
    accumulating.step()
    for name, chosen in optimizer.tuned().items():
        assert accumulating.tuned()[name].noise == pytest.approx(chosen.noise, rel=1e-9)


def test_an_empty_group_is_accepted() -> None:
    model = mlp()
    optimizer = AutoSGD(model, param_groups=[{"params": []}, {"params": model.parameters()}])
    before = weights(model)
    train(model, optimizer, batches(2))
    assert moved(model, before) == set(before)


def test_a_set_of_parameters_has_no_order() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="no order"):
        AutoSGD(model, param_groups=[{"params": set(model.parameters())}])


def test_a_rate_may_be_one_of_numpys() -> None:
    numpy = pytest.importorskip("numpy", reason="the library does without numpy")
    model = mlp()
    optimizer = AutoSGD(model, lr=numpy.float32(0.5), measure_every=numpy.int64(2))
    train(model, optimizer, batches(3))


def test_tuned_where_nothing_trains() -> None:
    model = mlp()
    optimizer = AutoSGD(model)
    model.requires_grad_(False)
    assert optimizer.tuned() == {}


def test_parameters_of_another_shape_in_their_place_are_refused() -> None:
    """Rows of a weight that were pruned or added keep its strides."""
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = AutoSGD(model)
    train(model, optimizer, batches(2))
    layer = model[0]
    layer.weight.data, layer.bias.data = torch.randn(5, 4), torch.zeros(5)
    optimizer.zero_grad()
    backward(model, batches(1)[0])
    with pytest.raises(ValueError, match="it was saved for another model"):
        optimizer.step()
