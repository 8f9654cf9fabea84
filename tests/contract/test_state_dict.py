"""A run that was saved and resumed equals the run that was not interrupted, bit for bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from autoopt import AutoAdam
from contract.small import assert_same, batches, every_optimizer, mlp, snapshot, train


def save_and_load(content: Any) -> Any:
    """Through a file, with nothing executed on the way back."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 0.5}, {"params": [*model[1].parameters(), *model[3].parameters()]}]


@every_optimizer
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["float32", "float64", "bfloat16"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"smoothing": 0.5, "start": (0.5, 0.1), "lr": 0.1}, {"granularity": "layer"}, {"granularity": "group"}],
    ids=["defaults", "options", "layer", "group"],
)
def test_resumed_run_is_the_uninterrupted_run(make: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    data = batches(8, dtype=dtype)
    model = mlp(dtype)
    optimizer = make(model, param_groups=groups(model), **options)
    train(model, optimizer, data[:4])
    checkpoint = save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, data[4:])

    torch.manual_seed(99)
    resumed = mlp(dtype)
    resumed_optimizer = make(resumed, param_groups=groups(resumed), **options)
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    train(resumed, resumed_optimizer, data[4:])

    assert_same(snapshot(resumed, resumed_optimizer), snapshot(model, optimizer))
    assert resumed_optimizer.tuned() == optimizer.tuned()


@every_optimizer
def test_a_loaded_optimizer_shows_what_was_tuned(make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(3))
    other = mlp()
    loaded = make(other)
    loaded.load_state_dict(save_and_load(optimizer.state_dict()))
    assert loaded.tuned() == optimizer.tuned()
    assert_same(loaded.state_dict(), optimizer.state_dict())


@every_optimizer
def test_state_is_not_rounded_to_bfloat16(make: Any) -> None:
    """torch casts loaded state to the parameter's dtype; statistics of 8 bits would be another run."""
    model = mlp(torch.bfloat16)
    optimizer = make(model)
    train(model, optimizer, batches(3, dtype=torch.bfloat16))
    loaded = make(mlp(torch.bfloat16))
    loaded.load_state_dict(save_and_load(optimizer.state_dict()))
    kept = [value for state in loaded.state.values() for value in state.values() if value.is_floating_point()]
    assert kept
    assert all(value.dtype in (torch.float32, torch.float64) for value in kept)


@every_optimizer
def test_resume_before_a_short_last_batch(make: Any) -> None:
    """γ is known from the checkpoint, so that a batch of one sample may come first."""
    data = [*batches(3), *batches(1, samples=1)]
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, data[:3])
    resumed = mlp()
    resumed_optimizer = make(resumed)
    resumed.load_state_dict(save_and_load(model.state_dict()))
    resumed_optimizer.load_state_dict(save_and_load(optimizer.state_dict()))
    train(model, optimizer, data[3:])
    train(resumed, resumed_optimizer, data[3:])
    assert_same(snapshot(resumed, resumed_optimizer), snapshot(model, optimizer))


def test_state_dict_before_the_first_step() -> None:
    data = batches(3)
    model, other = mlp(), mlp()
    optimizer, loaded = AutoAdam(model), AutoAdam(other)
    loaded.load_state_dict(save_and_load(optimizer.state_dict()))
    train(model, optimizer, data)
    train(other, loaded, data)
    assert_same(snapshot(other, loaded), snapshot(model, optimizer))


@every_optimizer
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process is what is meant
def test_distributed_checkpoint_resumes_bit_by_bit(make: Any, every: int, tmp_path: Path) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    model, other = net(), net()
    optimizer, fresh = make(model, measure_every=every), make(other, measure_every=every)
    train(model, optimizer, batches(5))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for one, opt in ((model, optimizer), (other, fresh)):
        train(one, opt, batches(4))
    assert_same(snapshot(other, fresh), snapshot(model, optimizer))
    with optimizer.averaged(), fresh.averaged():
        assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_of_another_optimizer_is_refused(momentum: float) -> None:
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    train(model, plain, batches(1))
    optimizer = AutoAdam(model)
    with pytest.raises(ValueError, match="saved by another optimizer"):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_what_a_hook_makes_of_a_state_is_loaded() -> None:
    model = mlp()
    optimizer = AutoAdam(model)
    train(model, optimizer, batches(2))
    saved = optimizer.state_dict()

    def emptied(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {key: {**own, "estimate": torch.zeros_like(own["estimate"])} for key, own in saved["state"].items()}
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(emptied)
    optimizer.load_state_dict(saved)
    assert all(not own["estimate"].any() for own in optimizer.state.values())
