"""What can go wrong between two steps: each has its outcome, and never a weight that is not finite."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoSGD
from contract.small import (
    assert_same,
    backward,
    batches,
    every_optimizer,
    mlp,
    moved,
    snapshot,
    train,
    weights,
)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(torch.tanh(self.block(x))))
        return result


@every_optimizer
def test_layer_called_twice_in_one_pass(make: Any) -> None:
    model = Twice()
    optimizer = make(model)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"'block'.*more than once"):
        backward(model, batches(1)[0])
    optimizer.zero_grad()
    optimizer.step()
    assert not moved(model, before)


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


class Folded(nn.Module):
    """Folds time into the batch for its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.folded = nn.Linear(4, 4), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.folded(self.body(x).reshape(-1, 2))
        return result


@every_optimizer
def test_layers_with_different_batch_sizes(make: Any) -> None:
    model = Folded()
    optimizer = make(model)
    before = weights(model)
    with pytest.raises(RuntimeError, match="first axis") as raised:
        model(torch.randn(8, 4)).sum().backward()
    assert "'body'" in str(raised.value)
    assert "'folded'" in str(raised.value)
    optimizer.zero_grad()
    optimizer.step()
    assert not moved(model, before)


@every_optimizer
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


@every_optimizer
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


@every_optimizer
@pytest.mark.parametrize(
    "zero",
    [
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(set_to_none=True),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        fill_with_zeros,
    ],
    ids=["optimizer-to-zero", "model", "model-to-zero", "by-hand"],
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
def test_second_optimizer_takes_over(make: Any) -> None:
    model = mlp()
    first = make(model)
    train(model, first, batches(1))
    second = AutoSGD(model)
    before = weights(model)
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match="another optimizer"):
        first.step()
    assert not moved(model, before)
    second.step()
    assert moved(model, before) == set(before)
    second.detach()
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.Tanh, nn.Linear]


@every_optimizer
def test_first_optimizer_leaves_the_second_alone(make: Any) -> None:
    """Detaching or dropping the one that was taken over does not cut off its successor."""
    model = mlp()
    first = make(model)
    second = make(model)
    first.detach()
    del first
    before = weights(model)
    train(model, second, batches(1))
    assert moved(model, before) == set(before)


@every_optimizer
def test_two_optimizers_share_a_model_by_groups(make: Any) -> None:
    model = mlp()
    first = make(model, param_groups=[{"params": model[0].parameters()}])
    second = make(model, param_groups=[{"params": [*model[1].parameters(), *model[3].parameters()]}])
    before = weights(model)
    backward(model, batches(1)[0])
    first.step()
    assert moved(model, before) == {"0.weight", "0.bias"}
    second.step()
    assert moved(model, before) == set(before)


@every_optimizer
def test_detached_optimizer_cannot_step(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    optimizer.detach()
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.Tanh, nn.Linear]
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match="detached"):
        optimizer.step()


@every_optimizer
def test_dropped_optimizer_gives_the_model_back(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    del optimizer
    gc.collect()
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.Tanh, nn.Linear]


@every_optimizer
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copied_optimizer_says_how_to_go_on(make: Any, duplicate: Callable[[Any], Any]) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    clone = duplicate(optimizer)
    with pytest.raises(RuntimeError, match=rf"{make.__name__}\(model\).*load_state_dict"):
        clone.step()


@every_optimizer
def test_copied_model_trains_on_its_own(make: Any) -> None:
    """As for an average of the weights, or a fork of the run."""
    data = batches(4)
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, data[:2])
    clone = copy.deepcopy(model)
    before = snapshot(model, optimizer)
    clone_optimizer = make(clone)
    clone_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(clone, clone_optimizer, data[2:])
    assert_same(snapshot(model, optimizer), before)
    train(model, optimizer, data[2:])
    assert_same(snapshot(model, optimizer), snapshot(clone, clone_optimizer))


@every_optimizer
def test_parameter_used_past_its_layer(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    F.linear(torch.randn(8, 4), model.get_parameter("0.weight")).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*Call the layer itself"):
        optimizer.step()


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
