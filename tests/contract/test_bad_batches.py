"""Passes and batches that cannot be learned from: refused by name or skipped, never a weight that is not finite."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.small import (
    assert_same,
    backward,
    batches,
    every_optimizer,
    mlp,
    moved,
    of_the_paper,
    robust,
    snapshot,
    train,
    weights,
)


@every_optimizer
def test_backward_twice_through_one_graph(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    x, y = batches(1)[0]
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"backward.*twice"):
        loss.backward()
    optimizer.zero_grad()
    before = weights(model)
    train(model, optimizer, batches(1))  # the next batch trains
    assert moved(model, before) == set(before)


class Some(nn.Module):
    """Gives only some of the samples to its second layer, and does not show which."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.few = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.few(torch.eye(8)[:5] @ self.body(x))
        return result


@every_optimizer
def test_layers_with_different_batch_sizes(make: Any) -> None:
    model = Some()
    optimizer = make(model)
    before = weights(model)
    with pytest.raises(RuntimeError, match="rows of the input of layer 'few'"):
        model(torch.randn(8, 4)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert not moved(model, before)


@of_the_paper
def test_first_batches_of_one_sample(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    before = weights(model)
    for batch in batches(2, samples=1):
        optimizer.zero_grad()
        backward(model, batch)
        with pytest.raises(RuntimeError, match="batch size of at least 2"):
            optimizer.step()
    assert not moved(model, before)
    train(model, optimizer, batches(1))
    assert moved(model, before)


@robust
def test_batches_of_one_sample_train_by_the_robust_rule(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    before = weights(model)
    train(model, optimizer, batches(3, samples=1))
    assert moved(model, before) == set(before)
    assert all(chosen.noise != chosen.noise for chosen in optimizer.tuned().values())  # not a number: not measured


@of_the_paper
def test_later_batch_of_one_sample_keeps_gamma_and_steps(make: Any) -> None:
    model = mlp()
    optimizer = make(model, smoothing=0.5)
    train(model, optimizer, batches(3))
    before, tuned = weights(model), optimizer.tuned()
    train(model, optimizer, batches(1, samples=1))
    assert moved(model, before) == set(before)
    assert optimizer.tuned() == tuned
    train(model, optimizer, batches(1))
    assert optimizer.tuned() != tuned


def nan_input(model: nn.Module) -> None:
    x, y = batches(1)[0]
    x[2, 1] = torch.nan
    backward(model, (x, y))


def inf_input(model: nn.Module) -> None:
    x, y = batches(1)[0]
    x[2, 1] = torch.inf
    backward(model, (x, y))


def nan_loss(model: nn.Module) -> None:
    x, y = batches(1)[0]
    (F.cross_entropy(model(x), y) * torch.nan).backward()


def one_nan(model: nn.Module) -> None:
    """In one layer alone: the whole step is still skipped."""
    backward(model, batches(1)[0])
    gradient = model.get_parameter("3.bias").grad
    assert gradient is not None
    gradient[1] = torch.nan


def one_inf(model: nn.Module) -> None:
    backward(model, batches(1)[0])
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    gradient[1, 1] = -torch.inf


def infinite_moments(model: nn.Module) -> None:
    """A gradient of 1e25 is finite in float32, its square is not."""
    x, y = batches(1)[0]
    (1e25 * F.cross_entropy(model(x), y)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_optimizer
@pytest.mark.parametrize("spoil", [nan_input, inf_input, nan_loss, one_nan, one_inf, infinite_moments])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"granularity": "group", "smoothing": 0.5}], ids=str)
def test_step_that_is_not_finite_is_skipped(
    make: Any, spoil: Callable[[nn.Module], None], options: dict[str, Any]
) -> None:
    """Nothing changes, and the run goes on as the run that never saw that batch, bit for bit."""
    data = batches(5)
    clean, model = mlp(), mlp()
    clean_optimizer, optimizer = make(clean, **options), make(model, **options)
    for number, batch in enumerate(data):
        if number in (0, 2):  # before the first step, and on the way
            before = snapshot(model, optimizer) if number else weights(model)
            optimizer.zero_grad()
            spoil(model)
            optimizer.step()
            assert_same(snapshot(model, optimizer) if number else weights(model), before)
        train(model, optimizer, [batch])
        train(clean, clean_optimizer, [batch])
    assert_same(snapshot(model, optimizer), snapshot(clean, clean_optimizer))
    assert optimizer.tuned() == clean_optimizer.tuned()


@every_optimizer
def test_zero_gradient_leaves_the_unit_alone(make: Any) -> None:
    """The first layer sees zeros: its weight has no gradient to speak of, all others train."""
    model = mlp()
    optimizer = make(model, weight_decay=0.1)
    data = batches(3)
    train(model, optimizer, data[:1])
    before, tuned = weights(model), optimizer.tuned()
    state = copy.deepcopy(optimizer.state_dict()["state"][0])
    train(model, optimizer, [(torch.zeros_like(data[1][0]), data[1][1])])
    assert moved(model, before) == set(before) - {"0.weight"}
    assert optimizer.tuned()["0.weight"] == tuned["0.weight"]
    assert_same(optimizer.state_dict()["state"][0], state)
    train(model, optimizer, data[2:])
    assert not torch.equal(model.get_parameter("0.weight"), before["0.weight"])


@every_optimizer
def test_zero_gradient_everywhere(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    (0 * model(batches(1)[0][0]).sum()).backward()
    optimizer.step()
    assert_same(snapshot(model, optimizer), before)


@every_optimizer
def test_empty_batch(make: Any) -> None:
    """The mean of no loss is not a number, its sum is zero: both leave everything alone."""
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    before = snapshot(model, optimizer)
    for reduction in ("mean", "sum"):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.zeros(0, 4)), torch.zeros(0, dtype=torch.long), reduction=reduction).backward()
        optimizer.step()
        assert_same(snapshot(model, optimizer), before)
