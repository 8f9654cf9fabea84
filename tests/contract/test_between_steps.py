"""What users do between two steps: freeze, branch, evaluate, discard and zero gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoSGD
from contract.small import assert_same, backward, batches, every_optimizer, mlp, moved, snapshot, train, weights


@every_optimizer
def test_frozen_parameters(make: Any) -> None:
    """A frozen layer, and a frozen weight whose bias learns."""
    model = mlp()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    optimizer = make(model)
    before = weights(model)
    train(model, optimizer, batches(3))
    assert moved(model, before) == {"1.weight", "1.bias", "3.bias"}
    assert optimizer.tuned().keys() == {"1.weight", "1.bias", "3.bias"}


@every_optimizer
def test_unfreezing_and_freezing_later(make: Any) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = make(model)
    train(model, optimizer, batches(2))
    tuned = optimizer.tuned()
    model[0].requires_grad_(True)
    assert {name: optimizer.tuned()[name] for name in tuned} == tuned
    before = weights(model)
    train(model, optimizer, batches(2))
    assert moved(model, before) == set(before)
    assert optimizer.tuned().keys() == set(before)

    model[3].requires_grad_(False)
    before = weights(model)
    train(model, optimizer, batches(2))
    assert moved(model, before) == {name for name in before if not name.startswith("3")}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.go_left = nn.Linear(4, 3), nn.Linear(4, 3), True

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.left(x) if self.go_left else self.right(x)
        return result


@every_optimizer
@pytest.mark.parametrize("granularity", ["tensor", "layer"])
def test_unused_parameters(make: Any, granularity: str) -> None:
    """A layer that took no part is left alone, and trains as if from the start when it does."""
    torch.manual_seed(5)
    model = Branches()
    optimizer = make(model, granularity=granularity)
    before = weights(model)
    train(model, optimizer, batches(2))
    assert moved(model, before) == {"left.weight", "left.bias"}

    alone = Branches()
    alone.load_state_dict(model.state_dict())
    alone.go_left = model.go_left = False
    train(model, optimizer, batches(2))
    train(alone, make(alone, granularity=granularity), batches(2))
    assert_same(weights(model), weights(alone))


@every_optimizer
def test_step_before_any_backward(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    before = weights(model)
    assert optimizer.step() is None
    assert not moved(model, before)
    clean = mlp()
    train(model, optimizer, batches(2))
    train(clean, make(clean), batches(2))
    assert_same(weights(model), weights(clean))


@every_optimizer
@pytest.mark.parametrize(
    "forget",
    [
        lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(set_to_none=True),
    ],
    ids=["optimizer", "optimizer-to-zero", "model"],
)
def test_discarded_backward_leaves_nothing_behind(make: Any, forget: Callable[[nn.Module, Any], None]) -> None:
    data = batches(3)
    clean, model = mlp(), mlp()
    clean_optimizer, optimizer = make(clean), make(model)
    for batch in data:
        train(clean, clean_optimizer, [batch])
        backward(model, batches(4, samples=3)[3])
        forget(model, optimizer)
        backward(model, batch)
        optimizer.step()
        forget(model, optimizer)
    assert_same(snapshot(model, optimizer), snapshot(clean, clean_optimizer))


def fill_with_zeros(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def by_old_custom(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


@every_optimizer
@pytest.mark.parametrize(
    "zero",
    [
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(set_to_none=True),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        fill_with_zeros,
        by_old_custom,
    ],
    ids=["optimizer-to-zero", "model", "model-to-zero", "by-hand", "by-old-custom"],
)
@pytest.mark.parametrize("late", [False, True], ids=["before-forward", "before-backward"])
def test_every_way_to_zero_the_gradients(make: Any, zero: Callable[[nn.Module, Any], None], late: bool) -> None:
    clean, model = mlp(), mlp()
    clean_optimizer, optimizer = make(clean), make(model)
    for x, y in batches(3):
        train(clean, clean_optimizer, [(x, y)])
        if not late:
            zero(model, optimizer)
        loss = F.cross_entropy(model(x), y)
        if late:
            zero(model, optimizer)
        loss.backward()
        optimizer.step()
    assert_same(snapshot(model, optimizer), snapshot(clean, clean_optimizer))


@every_optimizer
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"spread": "passes"}], ids=str)
def test_gradients_that_nobody_clears_are_an_error(make: Any, options: dict[str, Any]) -> None:
    """They would grow from step to step, and the statistics, which are of the last batch, would not."""
    model = mlp()
    optimizer = make(model, **options)
    first, second = batches(2)
    backward(model, first)
    optimizer.step()
    before = snapshot(model, optimizer)
    backward(model, second)
    with pytest.raises(RuntimeError, match=r"gradient of parameter '3\.\w+' was not cleared since the last step"):
        optimizer.step()
    assert_same(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    start = weights(model)
    backward(model, second)
    optimizer.step()
    assert moved(model, start) == set(start)


def test_gradients_that_a_later_zero_grad_clears_are_none() -> None:
    """The discriminator of a GAN: what the generator's pass adds to its gradients is thrown away."""
    clean, model = mlp(), mlp()
    clean_optimizer, optimizer = AutoSGD(clean), AutoSGD(model)
    for batch in batches(3):
        train(clean, clean_optimizer, [batch])
        train(model, optimizer, [batch])
        backward(model, batches(4)[3])  # on top of what the step has left
    assert_same(snapshot(model, optimizer), snapshot(clean, clean_optimizer))


def test_gradients_that_the_model_clears_are_none() -> None:
    """The same, where the loop begins with the discriminator's own zero_grad, as PyTorch's tutorial does."""
    clean, model = mlp(), mlp()
    clean_optimizer, optimizer = AutoSGD(clean), AutoSGD(model)
    for batch in batches(3):
        train(clean, clean_optimizer, [batch])
        model.zero_grad()
        backward(model, batch)
        optimizer.step()
        backward(model, batches(4)[3])
    model.zero_grad()
    clean.zero_grad()
    assert_same(snapshot(model, optimizer), snapshot(clean, clean_optimizer))


@every_optimizer
def test_evaluation_between_the_steps_changes_nothing(make: Any) -> None:
    clean, model = mlp(), mlp()
    clean_optimizer, optimizer = make(clean), make(model)
    for batch in batches(3):
        train(clean, clean_optimizer, [batch])
        optimizer.zero_grad()
        backward(model, batch)
        with torch.no_grad():
            model.eval()(torch.randn(3, 4))
            model.train()
        optimizer.step()
    assert_same(snapshot(model, optimizer), snapshot(clean, clean_optimizer))
