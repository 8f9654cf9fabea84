"""Copies, checkpoints and averages of a run that goes on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from contract.small import batches, mlp, train
from trust.fault_loops import Models, beside, other_input
from trust.faults import refused, survives
from trust.subjects import Make, trained


@survives()
def copied_model_of_averaged_weights(make: Make) -> Models:
    averages: list[AveragedModel] = []

    def average(model: nn.Sequential, _: Any) -> None:
        averages.append(AveragedModel(model))
        averages[0].update_parameters(model)
        averages[0](other_input()).sum().backward()

    return beside(make, before=average, after=average)


@survives()
def copied_and_pickled_in_between(make: Make) -> Models:
    def duplicate(model: nn.Sequential, optimizer: Any) -> None:
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(one[0]) is nn.Linear
            one(other_input()).sum().backward()
        copy.deepcopy(optimizer)
        pickle.dumps(optimizer)

    return beside(make, before=duplicate, after=duplicate)


@refused(RuntimeError, r"is a copy and knows no model.*load_state_dict")
def stepping_a_copied_optimizer(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    clone = copy.deepcopy(optimizer)
    yield model
    clone.step()


@refused(RuntimeError, r"is a copy and knows no model.*load_state_dict")
def stepping_an_unpickled_optimizer(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(1))
    clone = pickle.loads(pickle.dumps(optimizer))
    yield model
    clone.step()


def reloaded(content: Any) -> Any:
    """Through a file, and nothing in it is executed."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@survives()
def resumed_after_every_step(make: Make) -> Models:
    model = mlp()
    optimizer = make(model)
    for batch in batches(3):
        train(model, optimizer, [batch])
        saved = reloaded([model.state_dict(), optimizer.state_dict()])
        model = mlp()
        model.load_state_dict(saved[0])
        optimizer = make(model)
        optimizer.load_state_dict(saved[1])
    return model, trained(make)


@survives()
def state_dict_loaded_into_itself(make: Make) -> Models:
    return beside(make, after=lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()))


@survives()
def group_dicts_replaced(make: Make) -> Models:
    """Accelerate does so when it wraps an optimizer."""

    def replace(_: nn.Sequential, optimizer: Any) -> None:
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]

    return beside(make, before=replace, after=replace)


@survives()
def evaluation_of_the_average(make: Make) -> Models:
    def evaluate(model: nn.Sequential, optimizer: Any) -> None:
        with optimizer.averaged(), torch.no_grad():
            model(other_input())

    return beside(make, before=evaluate, after=evaluate)


@survives()
def error_inside_the_average(make: Make) -> Models:
    def evaluate(_: nn.Sequential, optimizer: Any) -> None:
        try:
            with optimizer.averaged():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass

    return beside(make, before=evaluate, after=evaluate)


@refused(RuntimeError, "step.. was called inside")
def step_inside_the_average(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    yield model
    with optimizer.averaged():
        train(model, optimizer, batches(1))


@refused(RuntimeError, "state_dict.. was called inside")
def checkpoint_inside_the_average(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    yield model
    with optimizer.averaged():
        optimizer.state_dict()
