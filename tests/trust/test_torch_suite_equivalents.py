"""What PyTorch's own optimizer suite asks of an optimizer, asked with a model (trust/torch_suite.py runs the original).

Schedulers, groups, closures and resuming have tests of their own in tests/contract; here is the rest.
"""

from __future__ import annotations

import copy
import io
import tracemalloc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from contract.small import assert_same, backward, batches, mlp, moved, snapshot, train, weights
from trust.subjects import Make, every_optimizer


def loss_of(model: nn.Module) -> float:
    x, y = batches(1, samples=64)[0]
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


@every_optimizer
@pytest.mark.parametrize("options", [{}, {"lr": 0.5}, {"weight_decay": 0.01}, {"granularity": "group"}], ids=str)
def test_goes_the_right_way(make: Make, options: dict[str, Any]) -> None:
    model = mlp()
    before = loss_of(model)
    train(model, make(model, **options), batches(20))
    assert loss_of(model) < before


@every_optimizer
def test_groups_with_their_own_weight_decay(make: Make) -> None:
    """What is decayed ends smaller than what is not."""
    sizes = []
    for decay in (0.0, 10.0):
        model = mlp()
        heads = {"params": list(model[3].parameters()), "weight_decay": decay}
        body = {"params": [*model[0].parameters(), *model[1].parameters()]}
        train(model, make(model, param_groups=[body, heads], decoupled_weight_decay=True), batches(20))
        sizes.append(float(model[3].weight.detach().norm()))
    assert sizes[1] < sizes[0]


@every_optimizer
def test_almost_no_rate_is_almost_no_step(make: Make) -> None:
    model = mlp()
    before = weights(model)
    train(model, make(model, lr=1e-28), batches(5))
    assert all((after - before[name]).abs().max() < 1e-20 for name, after in weights(model).items())


@every_optimizer
def test_can_be_printed(make: Make) -> None:
    text = repr(make(mlp(), lr=0.25))
    assert "Auto" in text
    assert "0.25" in text


@every_optimizer
def test_state_is_not_empty_after_a_step_and_defaults_are_those_given(make: Make) -> None:
    model = mlp()
    optimizer = make(model, weight_decay=0.125)
    assert optimizer.defaults["weight_decay"] == 0.125
    assert optimizer.param_groups[0]["lr"] == 1.0
    train(model, optimizer, batches(1))
    assert set(optimizer.state) >= set(model.parameters())
    assert all(optimizer.state[parameter] for parameter in model.parameters())


@every_optimizer
def test_state_dict_equals_itself_after_a_file(make: Make) -> None:
    model = mlp()
    optimizer = make(model)
    for state in (optimizer.state_dict(), train(model, optimizer, batches(3)) or optimizer.state_dict()):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=True), state)


@every_optimizer
def test_loading_leaves_the_loaded_dict_alone(make: Make) -> None:
    model, other = mlp(), mlp()
    optimizer, loaded = make(model), make(other)
    train(model, optimizer, batches(2))
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    loaded.load_state_dict(state)
    train(other, loaded, batches(2))
    assert_same(state, kept)


@every_optimizer
def test_state_with_plain_numbers_loads(make: Make) -> None:
    """Older optimizers kept their step count as a number."""
    model, other = mlp(), mlp()
    optimizer, loaded = make(model), make(other)
    train(model, optimizer, batches(2))
    state = copy.deepcopy(optimizer.state_dict())
    for known in state["state"].values():
        for key, value in known.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                known[key] = value.item()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(state)
    train(model, optimizer, batches(2))
    train(other, loaded, batches(2))
    assert_same(snapshot(other, loaded), snapshot(model, optimizer))


@every_optimizer
def test_step_hooks_run_in_order_and_can_be_removed(make: Make) -> None:
    model = mlp()
    optimizer = make(model)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("all before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all after")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    train(model, optimizer, batches(1))
    assert calls == ["all before", "before", "after", "all after"]
    for handle in handles:
        handle.remove()
    train(model, optimizer, batches(1))
    assert len(calls) == 4


@every_optimizer
def test_state_dict_hooks(make: Make) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    calls: list[str] = []

    def after(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("after")
        return {**state, "note": 1}

    def before_loading(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state)
        changed["param_groups"][0]["lr"] = 0.5
        return changed

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(after)
    state = optimizer.state_dict()
    assert calls == ["before", "after"]
    assert state["note"] == 1

    loaded = make(mlp())
    loaded.register_load_state_dict_pre_hook(before_loading)
    loaded.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    loaded.load_state_dict(state)
    assert calls[-1] == "loaded"
    assert loaded.param_groups[0]["lr"] == 0.5


@every_optimizer
def test_deepcopy_has_all_public_attributes(make: Make) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    copied = copy.deepcopy(optimizer)
    public = {key for key in vars(optimizer) if not key.startswith("_")}
    assert public <= set(vars(copied))
    assert_same(copied.state_dict(), optimizer.state_dict())


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(make: Make, dtype: torch.dtype) -> None:
    model = mlp(dtype)
    before = weights(model)
    train(model, make(model), batches(5, dtype=dtype))
    assert moved(model, before)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert parameter.isfinite().all(), name


@every_optimizer
def test_zero_grad_both_ways(make: Make) -> None:
    model = mlp()
    optimizer = make(model)
    backward(model, batches(1)[0])
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@every_optimizer
def test_memory_is_a_few_copies_of_the_model(make: Make) -> None:
    """State: at most four numbers for each weight, in the precision of the weights."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    optimizer = make(model)
    x, y = torch.randn(4, 256), torch.randint(0, 256, (4,))
    tracemalloc.start()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    assert sum(storages.values()) <= 4.1 * 4 * 256 * 256
    assert python < 2_000_000  # and next to nothing in Python


@every_optimizer
def test_banana_valley(make: Make) -> None:
    """Rosenbrock's function, as a layer of two weights and a loss: two hundred steps come closer to its minimum."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.5], [1.5]]))
    optimizer = make(model, lr=0.1)
    x = torch.ones(4, 1, dtype=torch.float64) + 0.01 * torch.randn(4, 1, dtype=torch.float64)

    def valley() -> Tensor:
        a, b = model(x).unbind(1)
        return ((1 - a) ** 2 + 100 * (b - a**2) ** 2).mean()

    before = valley().item()
    for _ in range(200):
        optimizer.zero_grad()
        valley().backward()
        optimizer.step()
    assert valley().item() < before
