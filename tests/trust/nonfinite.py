"""One bad batch at any step: the run then equals, bit for bit, the run that never saw it.

Two runs go side by side. Before each step one of them is given a batch that is not finite, of a random kind, and must
not change by it; after each step both must be the same in every bit. So every step is a trial of its own.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.small import assert_same, backward, batches, snapshot, train
from trust.subjects import Make, glances

Spoil = Callable[[nn.Module, random.Random], None]
VALUES = (torch.nan, torch.inf, -torch.inf)


def network() -> nn.Sequential:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.PReLU(), nn.Linear(6, 3))


def in_the_input(model: nn.Module, chance: random.Random) -> None:
    x, y = batches(1)[0]
    x[chance.randrange(8), chance.randrange(4)] = chance.choice(VALUES)
    backward(model, (x, y))


def in_the_loss(model: nn.Module, chance: random.Random) -> None:
    x, y = batches(1)[0]
    (F.cross_entropy(model(x), y) * chance.choice(VALUES)).backward()


def in_every_gradient(model: nn.Module, chance: random.Random) -> None:
    backward(model, batches(1)[0])
    for gradient in gradients(model):
        gradient.fill_(chance.choice(VALUES))


def in_one_gradient(model: nn.Module, chance: random.Random) -> None:
    backward(model, batches(1)[0])
    chosen = chance.choice(gradients(model)).view(-1)
    chosen[chance.randrange(len(chosen))] = chance.choice(VALUES)


def in_one_micro_batch(model: nn.Module, chance: random.Random) -> None:
    backward(model, batches(1)[0])
    in_the_input(model, chance)
    backward(model, batches(1)[0])


def in_the_squares_alone(model: nn.Module, chance: random.Random) -> None:
    """Finite gradients whose squares are not."""
    x, y = batches(1)[0]
    (F.cross_entropy(model(x), y) * 10.0 ** chance.uniform(25, 30)).backward()


KINDS: tuple[Spoil, ...] = (
    in_the_input, in_the_loss, in_every_gradient, in_one_gradient, in_one_micro_batch, in_the_squares_alone,
)  # fmt: skip


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_finite(state: Any) -> None:
    """All but the noise, which is not a number before the first step."""
    for number, known in state["optimizer"]["state"].items():
        for key, value in known.items():
            assert key == "noise" or torch.as_tensor(value).isfinite().all(), f"{key} of parameter {number}"


@glances()
def trials(make: Make, count: int, seed: int) -> int:
    """As many steps, with a bad batch before each; returns how many there were."""
    chance = random.Random(seed)
    clean, model = network(), network()
    clean_optimizer, optimizer = make(clean), make(model)
    data = batches(20)
    for number in range(count):
        before = snapshot(model, optimizer) if number else copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        spoil = KINDS[number % len(KINDS)] if number < 2 * len(KINDS) else chance.choice(KINDS)
        spoil(model, chance)
        optimizer.step()
        assert_same(snapshot(model, optimizer) if number else model.state_dict(), before)
        train(model, optimizer, [data[number % len(data)]])
        train(clean, clean_optimizer, [data[number % len(data)]])
        after = snapshot(model, optimizer)
        assert_same(after, snapshot(clean, clean_optimizer))
        assert_finite(after)
        assert optimizer.tuned() == clean_optimizer.tuned()
    return count
