"""A long run with evaluation in between: nothing may grow, and nothing may be left when the optimizer lets go."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.small import batches
from trust.subjects import Make, glances

WARM = 100  # steps after which nothing may grow
PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Soak:
    """What grew over the steps after the first hundred."""

    steps: int
    tensors: int  # live tensors more
    objects: int  # objects of Python more
    slope: float  # bytes of resident memory per step, by least squares


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


@glances()
def soak(make: Make, steps: int) -> Soak:
    """Train for so many steps, evaluating and reading what was chosen every fiftieth."""
    model = network()
    before = traces(model)
    optimizer = make(model)
    data = batches(10)
    places = sorted({WARM + (steps - WARM) * k // 50 for k in range(51)})
    counted, memory = [], []
    for step in range(steps + 1):
        if step in (WARM, steps):
            counted.append(counts())
        if places and step == places[0]:
            memory.append((places.pop(0), resident()))
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 50 == 0:
            evaluate(model, x, y)
            optimizer.tuned()
            optimizer.state_dict()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    optimizer.detach()
    assert traces(model) == before, "detach() left something behind"
    return Soak(steps, counted[1][0] - counted[0][0], counted[1][1] - counted[0][1], slope(memory))


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(x), y))
    model.train()
    return loss


def counts() -> tuple[int, int]:
    """(live tensors, live objects)."""
    gc.collect()
    found = gc.get_objects()
    return sum(issubclass(type(thing), Tensor) for thing in found), len(found)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def slope(memory: list[tuple[int, int]]) -> float:
    points = torch.tensor(memory, dtype=torch.float64)
    centred = points - points.mean(0)
    return float((centred[:, 0] * centred[:, 1]).sum() / centred[:, 0].square().sum())


def traces(model: nn.Module) -> list[tuple[type, tuple[str, ...], tuple[int, ...]]]:
    """What an optimizer could leave behind: classes, attributes, hooks."""
    return [
        (
            type(module),
            tuple(sorted(vars(module))),
            tuple(len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks")),
        )
        for module in model.modules()
    ] + [
        (type(parameter), (), (len(parameter._backward_hooks or ()), len(parameter._post_accumulate_grad_hooks or ())))
        for parameter in model.parameters()
    ]
