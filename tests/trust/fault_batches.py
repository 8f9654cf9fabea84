"""Faults in the data and in the gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.small import Batch, backward, batches, mlp, train
from trust.faults import refused, survives
from trust.subjects import Make, trained

Models = tuple[nn.Module, nn.Module]


def interrupted(make: Make, spoil: Callable[[nn.Module], None], at: tuple[int, ...] = (0, 2)) -> Models:
    """A run with bad passes before some of its steps, and the run that never saw them."""
    model = mlp()
    optimizer = make(model)
    for number, batch in enumerate(batches(3)):
        for _ in range(at.count(number)):
            optimizer.zero_grad()
            spoil(model)
            optimizer.step()
        train(model, optimizer, [batch])
    return model, trained(make)


def spoiled(value: float) -> Batch:
    x, y = batches(1)[0]
    x[2, 1] = value
    return x, y


def gradient(model: nn.Module, name: str) -> Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


@survives()
def nan_in_an_input(make: Make) -> Models:
    return interrupted(make, lambda model: backward(model, spoiled(torch.nan)) and None)


@survives()
def infinity_in_an_input(make: Make) -> Models:
    return interrupted(make, lambda model: backward(model, spoiled(-torch.inf)) and None)


@survives()
def nan_loss(make: Make) -> Models:
    return interrupted(make, lambda model: (model(batches(1)[0][0]).sum() * torch.nan).backward())


@survives()
def infinite_loss(make: Make) -> Models:
    return interrupted(make, lambda model: (model(batches(1)[0][0]).sum() * torch.inf).backward())


@survives()
def nan_in_one_gradient(make: Make) -> Models:
    def spoil(model: nn.Module) -> None:
        backward(model, batches(1)[0])
        gradient(model, "3.bias")[1] = torch.nan

    return interrupted(make, spoil)


@survives()
def infinity_in_one_gradient(make: Make) -> Models:
    def spoil(model: nn.Module) -> None:
        backward(model, batches(1)[0])
        gradient(model, "0.weight")[1, 1] = -torch.inf

    return interrupted(make, spoil)


@survives()
def squares_beyond_float32(make: Make) -> Models:
    """A gradient of 1e25 is finite, its square is not."""
    return interrupted(make, lambda model: (1e25 * model(batches(1)[0][0]).sum()).backward())


@survives()
def five_bad_batches_in_a_row(make: Make) -> Models:
    return interrupted(make, lambda model: backward(model, spoiled(torch.nan)) and None, at=(1,) * 5)


@survives()
def bad_micro_batch_in_an_accumulation(make: Make) -> Models:
    def spoil(model: nn.Module) -> None:
        for batch in (batches(1)[0], spoiled(torch.nan), batches(1)[0]):
            backward(model, batch)

    return interrupted(make, spoil)


@survives()
def bad_batch_that_no_step_follows(make: Make) -> Models:
    def spoil(model: nn.Module) -> None:
        backward(model, spoiled(torch.inf))
        model.zero_grad()

    return interrupted(make, spoil)


@survives()
def zero_gradient_everywhere(make: Make) -> Models:
    return interrupted(make, lambda model: (0 * model(batches(1)[0][0]).sum()).backward())


@survives()
def gradient_made_zero_before_the_step(make: Make) -> Models:
    def spoil(model: nn.Module) -> None:
        backward(model, batches(1)[0])
        for parameter in model.parameters():
            gradient_of = parameter.grad
            assert gradient_of is not None
            gradient_of.zero_()

    return interrupted(make, spoil)


@survives()
def zero_gradient_of_one_weight(make: Make) -> Models:
    """The first layer sees zeros, so its weight has no gradient: as if it were frozen."""
    data = [(torch.zeros_like(x), y) for x, y in batches(3)]
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    train(frozen, make(frozen), data)
    return trained(make, data), frozen


@survives()
def empty_batch_with_a_mean(make: Make) -> Models:
    return interrupted(make, lambda model: backward(model, (torch.zeros(0, 4), torch.zeros(0).long())) and None)


@survives()
def empty_batch_with_a_sum(make: Make) -> Models:
    return interrupted(make, lambda model: model(torch.zeros(0, 4)).sum().backward())


@survives()
def empty_micro_batch(make: Make) -> Models:
    model = mlp()
    optimizer = make(model)
    for batch in batches(3):
        optimizer.zero_grad()
        model(torch.zeros(0, 4)).sum().backward()
        backward(model, batch)
        model(torch.zeros(0, 4)).sum().backward()
        optimizer.step()
    return model, trained(make)


def accumulated(make: Make, sizes: tuple[int, ...]) -> nn.Module:
    """Every batch of eight in micro-batches of these sizes."""
    model = mlp(torch.float64)
    optimizer = make(model)
    for x, y in batches(3, dtype=torch.float64):
        optimizer.zero_grad()
        for some_x, some_y in zip(x.split(sizes), y.split(sizes), strict=True):
            (F.cross_entropy(model(some_x), some_y, reduction="sum") / len(x)).backward()
        optimizer.step()
    return model


@survives(rounding=1e-9)
def accumulation_is_one_large_batch(make: Make) -> Models:
    return accumulated(make, (4, 4)), accumulated(make, (8,))


@survives(rounding=1e-9)
def accumulation_with_a_short_last_batch(make: Make) -> Models:
    return accumulated(make, (5, 3)), accumulated(make, (8,))


@survives(rounding=1e-9)
def accumulation_of_single_samples(make: Make) -> Models:
    return accumulated(make, (1,) * 8), accumulated(make, (8,))


def scaled(make: Make, factor: float, dtype: torch.dtype) -> nn.Module:
    model = mlp(dtype)
    optimizer = make(model)
    for x, y in batches(1, dtype=dtype):
        optimizer.zero_grad()
        (factor * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    return model.float()


@survives(rounding=1e-4)
def tiny_loss(make: Make) -> Models:
    """Right is what float64 does."""
    return scaled(make, 1e-9, torch.float32), scaled(make, 1e-9, torch.float64)


@survives(rounding=1e-3)
def huge_loss(make: Make) -> Models:
    return scaled(make, 1e6, torch.float32), scaled(make, 1e6, torch.float64)


@survives(rounding=1e-5)
def last_batch_of_one_sample(make: Make) -> Models:
    """It takes its step with what the others taught; right is what float64 does, and that it moves."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model = mlp(dtype)
        optimizer = make(model)
        train(model, optimizer, batches(3, dtype=dtype))
        before = model[0].weight.clone()
        train(model, optimizer, batches(1, samples=1, dtype=dtype))
        assert not torch.equal(model[0].weight, before)
        found.append(model.float())
    return found[0], found[1]


@survives()
def identical_samples(make: Make) -> Models:
    """No spread at all, whichever way it is rounded: finite, and the same twice."""
    data = [(x[:1].expand(8, -1).contiguous(), y[:1].expand(8).contiguous()) for x, y in batches(3)]
    return trained(make, data), trained(make, data)


@refused(RuntimeError, "first axis of every layer's input must be the batch")
def time_folded_into_the_batch(make: Make) -> Generator[nn.Module]:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(2, 3)])
    optimizer = make(model)
    yield model
    model[1](model[0](torch.randn(8, 4)).reshape(-1, 2)).sum().backward()
    optimizer.step()


@refused(RuntimeError, "has a gradient but no statistics")
def gradient_made_by_hand(make: Make) -> Generator[nn.Module]:
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, batches(2))
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    yield model
    optimizer.step()
