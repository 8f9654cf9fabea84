"""rule="robust" never diverges: random small problems end at or below their initial loss.

A short version of benchmarks/research/random_problems.py, which trains 500 of them.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD

KINDS: list[Any] = [AutoSGD, AutoAdam, AutoAdaGrad]
STARTS = [1.0, 0.0, 0.01, 10.0, 100.0]  # what the initial weights are multiplied by
ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid]
NORMS: list[Callable[[int], nn.Module]] = [lambda _: nn.Identity(), nn.BatchNorm1d, nn.LayerNorm]
STEPS, LAST = 100, 20  # the step reaches its full size at step 100


def net(rng: random.Random, start: float, inputs: int, outputs: int) -> nn.Sequential:
    width, norm, activation = rng.choice([4, 16, 64]), rng.choice(NORMS), rng.choice(ACTIVATIONS)
    sizes = [inputs] + [width] * rng.randint(1, 3)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), norm(b), activation())]
    model = nn.Sequential(*layers, nn.Linear(width, outputs))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(start)
                layer.bias.mul_(start)
    return model


def targets(x: Tensor, outputs: int, classes: bool) -> Tensor:
    """Something to learn, an offset among it: with weights of zero nothing but the last bias has a gradient."""
    y = (
        (x @ torch.randn(x.shape[-1], outputs)).tanh()
        + torch.randn(outputs)
        + 0.3 * torch.randn(*x.shape[:-1], outputs)
    )
    return y.argmax(-1) if classes else y


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [False, True], ids=["regression", "classification"])
def test_ends_at_or_below_the_initial_loss(kind: Any, start: float, classes: bool) -> None:
    """The last and the averaged weights, each on the very batches that the initial weights are judged by."""
    rng = random.Random(f"{kind.__name__} {start} {classes}")
    torch.manual_seed(rng.randrange(1000))
    inputs, outputs, scale = rng.randint(2, 20), rng.randint(2, 10), 10 ** rng.uniform(-3, 3)
    model = net(rng, start, inputs, outputs)
    x = torch.randn(STEPS, rng.choice([2, 8, 64]), inputs)
    y, x = targets(x, outputs, classes), 10 ** rng.uniform(-1, 1) * x
    initial = copy.deepcopy(model)

    def loss_of(net: nn.Module, i: int) -> Tensor:
        return scale * (F.cross_entropy(net(x[i]), y[i]) if classes else F.mse_loss(net(x[i]), y[i]))

    @torch.no_grad()
    def end(net: nn.Module) -> float:
        return sum(loss_of(net, i).item() for i in range(STEPS - LAST, STEPS)) / LAST

    optimizer = kind(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
    optimizer.detach()
    assert end(model) <= end(initial)
    with optimizer.averaged():
        assert end(model) <= end(initial)
