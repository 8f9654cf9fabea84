"""Options that make no sense, groups that contradict each other, states that belong to something else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from contract.small import batches, mlp, train
from trust.fault_models import head_and_rest
from trust.faults import FAULTS, Refused, refused, survives
from trust.subjects import Make, trained

Models = tuple[nn.Module, nn.Module]


def bad_option(option: str, value: Any) -> Callable[[Make], Generator[nn.Module]]:
    def run(make: Make) -> Generator[nn.Module]:
        model = mlp()
        yield model
        try:
            make(model, **{option: value})
        finally:
            assert type(model[0]) is nn.Linear  # left as it was

    return run


for option, value in [
    ("lr", -1.0), ("lr", float("nan")), ("lr", "fast"), ("weight_decay", -0.1), ("weight_decay", float("inf")),
    ("rule", "papers"), ("granularity", "network"), ("measure_every", 0),
]:  # fmt: skip
    FAULTS[f"{option}_is_{value}"] = Refused(bad_option(option, value), ValueError, f"{option} is .*must be")


@survives()
def group_with_its_own_lr(make: Make) -> Models:
    """As two optimizers with these rates."""
    one, two = mlp(), mlp()
    train(one, make(one, param_groups=head_and_rest(one, lr=0.25)), batches(3))
    pair = [make(two, param_groups=[group]) for group in head_and_rest(two, lr=0.25)]
    for x, y in batches(3):
        two.zero_grad()
        nn.functional.cross_entropy(two(x), y).backward()
        for half in pair:
            half.step()
    return one, two


@survives()
def scheduler_at_zero(make: Make) -> Models:
    """A rate of 0 leaves weights and statistics alone: the run that did not see these batches."""
    model = mlp()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step % 2 == 0))
    data = batches(5)
    for batch in data:
        train(model, optimizer, [batch])
        scheduler.step()
    return model, trained(make, data[::2])


@survives()
def frozen_by_a_group_with_lr_zero(make: Make) -> Models:
    model, frozen = mlp(), mlp()
    train(model, make(model, param_groups=head_and_rest(model, lr=0.0)), batches(3))
    frozen[3].requires_grad_(False)
    train(frozen, make(frozen), batches(3))
    return model, frozen


def rate_on_the_way(value: float) -> Callable[[Make], Generator[nn.Module]]:
    """A scheduler that computes nonsense."""

    def run(make: Make) -> Generator[nn.Module]:
        model = mlp()
        optimizer = make(model)
        train(model, optimizer, batches(1))
        optimizer.param_groups[0]["lr"] = value
        yield model
        train(model, optimizer, batches(1))

    return run


FAULTS["lr_becomes_nan_on_the_way"] = Refused(rate_on_the_way(float("nan")), ValueError, "lr is nan")
FAULTS["lr_becomes_negative_on_the_way"] = Refused(rate_on_the_way(-0.1), ValueError, "lr is -0.1")


@refused(ValueError, "appear in more than one parameter group")
def parameter_in_two_groups(make: Make) -> Generator[nn.Module]:
    model = mlp()
    yield model
    make(model, param_groups=[{"params": model.parameters()}, {"params": model[0].parameters()}])


@refused(ValueError, "not a parameter of the model")
def parameter_of_another_model(make: Make) -> Generator[nn.Module]:
    model = mlp()
    yield model
    make(model, param_groups=[{"params": mlp().parameters()}])


@refused(ValueError, "empty parameter list")
def no_group_at_all(make: Make) -> Generator[nn.Module]:
    model = mlp()
    yield model
    make(model, param_groups=[])


@refused(ValueError, "saved for another model")
def state_of_other_shapes(make: Make) -> Generator[nn.Module]:
    other = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    donor = make(other)
    train(other, donor, batches(1))
    model = mlp()
    optimizer = make(model)
    yield model
    optimizer.load_state_dict(donor.state_dict())
    train(model, optimizer, batches(1))


@refused(ValueError, "another optimizer")
def state_of_another_optimizer(make: Make) -> Generator[nn.Module]:
    """With a part of its state missing it would go on with wrong averages."""
    model, other = mlp(), mlp()
    optimizer = make(model)
    donor: Any = torch.optim.Adam(other.parameters())
    train(other, donor, batches(2))
    yield model
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict({**state, "state": donor.state_dict()["state"]})
    train(model, optimizer, batches(1))


@refused(ValueError, "different number of parameter groups|doesn't match the size")
def state_of_other_groups(make: Make) -> Generator[nn.Module]:
    model, other = mlp(), mlp()
    optimizer = make(model)
    yield model
    optimizer.load_state_dict(make(other, param_groups=head_and_rest(other)).state_dict())


@survives()
def older_checkpoint_without_names_and_options(make: Make) -> Models:
    """What a state dict does not say keeps its default."""
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(3)[:2])
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for key in set(group) - {"params", "lr"}:
            del group[key]
    resumed = mlp()
    resumed.load_state_dict(model.state_dict())
    other = make(resumed)
    other.load_state_dict(old)
    train(resumed, other, batches(3)[2:])
    return resumed, trained(make)


class Payload:
    """What an attacker would put into a checkpoint."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('the payload ran')",)


@refused(pickle.UnpicklingError, "Weights only load failed")
def crafted_checkpoint(make: Make) -> Generator[nn.Module]:
    """torch refuses it, as long as nothing of ours needs more than weights_only."""
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    file = io.BytesIO()
    torch.save({**optimizer.state_dict(), "extra": Payload()}, file)
    file.seek(0)
    yield model
    optimizer.load_state_dict(torch.load(file, weights_only=True))
