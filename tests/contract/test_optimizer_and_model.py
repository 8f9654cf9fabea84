"""The tie between an optimizer and its model: taking over, sharing, detaching, copying."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoSGD
from contract.small import assert_same, backward, batches, every_optimizer, mlp, moved, snapshot, train, weights


@every_optimizer
def test_second_optimizer_takes_over(make: Any) -> None:
    model = mlp()
    first = make(model)
    train(model, first, batches(1))
    second = AutoSGD(model)
    second.zero_grad()
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


class Scaled(nn.Module):
    """A parameter that no layer of torch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 2),
        lambda: nn.LSTM(6, 2, batch_first=True),
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 2)),
        Scaled,
    ],
    ids=["linear", "lstm", "transformer", "weight_norm", "bare"],
)
@pytest.mark.parametrize("spread", ["samples", "passes"])
def test_model_and_optimizer_are_freed(make: Callable[[], nn.Module], spread: str) -> None:
    """A notebook that makes one model after the other must not fill the memory."""
    torch.manual_seed(0)
    model = make()
    optimizer = AutoSGD(model, spread=spread)
    for _ in range(2):
        optimizer.zero_grad()
        result = model(torch.randn(4, 3, 6))
        (result[0] if isinstance(result, tuple) else result).square().mean().backward()
        optimizer.step()
    alive = [weakref.ref(thing) for thing in (model, optimizer, next(model.parameters()))]
    del model, optimizer, result
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]


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
