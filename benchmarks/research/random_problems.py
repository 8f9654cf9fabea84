"""Research: does the robust rule ever diverge? 500 random small problems, trained by the library (docs/research.md).

    python benchmarks/research/random_problems.py --out FILE [--problems 500] [--first 0]

A problem draws depth, width, activation, norm layer, batch size, scale of the loss and of the inputs, the scale of the
initial weights (0 and 100 too) and its kind, regression or classification of a teacher's targets, on fresh samples.
A run fails if the mean loss of its last 20 batches, as trained or of the averaged weights, is not finite or is above
that of the initial weights on the very same batches.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD

KINDS: dict[str, Any] = {"sgd": AutoSGD, "adam": AutoAdam, "adagrad": AutoAdaGrad}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid, "leaky": nn.LeakyReLU,
}  # fmt: skip
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda _: nn.Identity(), "batch": nn.BatchNorm1d, "layer": nn.LayerNorm,
}  # fmt: skip
LAST = 20  # batches that the end is judged by


@dataclass
class Problem:
    """What is drawn at random."""

    seed: int
    depth: int  # hidden layers
    width: int
    inputs: int
    outputs: int
    activation: str
    norm: str
    batch: int
    steps: int
    classes: bool  # classification, else regression
    loss_scale: float
    input_scale: float
    start: float  # multiplies the initial weights


def draw(seed: int) -> Problem:
    """Problem number `seed`."""
    rng = random.Random(seed)
    norm = rng.choice(["none", "none", "batch", "layer"])
    return Problem(
        seed=seed, depth=rng.randint(1, 4), width=round(4 * 16 ** rng.random()), inputs=rng.randint(2, 20),
        outputs=rng.randint(2, 10), activation=rng.choice(list(ACTIVATIONS)), norm=norm,
        batch=max(round(64 ** rng.random()), 2 if norm == "batch" else 1), steps=rng.randint(200, 400),
        classes=rng.random() < 0.5, loss_scale=10 ** rng.uniform(-3, 3), input_scale=10 ** rng.uniform(-1, 1),
        start=rng.choice([1.0, 1.0, 0.0, 0.01, 10.0, 100.0]),
    )  # fmt: skip


def make_model(problem: Problem) -> nn.Module:
    """An MLP; the initial weights of its linear layers are multiplied, the norm layers start as they are."""
    torch.manual_seed(problem.seed)
    layers: list[nn.Module] = []
    size = problem.inputs
    for _ in range(problem.depth):
        layers += [nn.Linear(size, problem.width), NORMS[problem.norm](problem.width)]
        layers += [ACTIVATIONS[problem.activation]()]
        size = problem.width
    model = nn.Sequential(*layers, nn.Linear(size, problem.outputs))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(problem.start)
                layer.bias.mul_(problem.start)
    return model


def make_batches(problem: Problem) -> tuple[Tensor, Tensor]:
    """x and y for every step: a teacher with one hidden layer and an offset, and noise."""
    g = torch.Generator().manual_seed(problem.seed)
    x = torch.randn(problem.steps, problem.batch, problem.inputs, generator=g)
    hidden = torch.randn(problem.inputs, 16, generator=g) / problem.inputs**0.5
    out, offset = torch.randn(16, problem.outputs, generator=g) / 4, torch.randn(problem.outputs, generator=g)
    y = 2 * (x @ hidden).tanh() @ out + offset
    if problem.classes:
        uniform = torch.rand(y.shape, generator=g)
        return problem.input_scale * x, (2 * y - (-uniform.log()).log()).argmax(-1)
    return problem.input_scale * x, y + 0.3 * torch.randn(y.shape, generator=g)


def train(problem: Problem, kind: str) -> tuple[float, float, float]:
    """Mean loss of the last batches: with the initial weights, as trained, and with the averaged weights."""
    model, (x, y) = make_model(problem), make_batches(problem)
    initial = copy.deepcopy(model)

    def loss_of(net: nn.Module, i: int) -> Tensor:
        out = net(x[i])
        return problem.loss_scale * (F.cross_entropy(out, y[i]) if problem.classes else F.mse_loss(out, y[i]))

    @torch.no_grad()
    def mean_of(net: nn.Module) -> float:
        return torch.stack([loss_of(net, i) for i in range(problem.steps - LAST, problem.steps)]).mean().item()

    optimizer = KINDS[kind](model)
    losses = []
    for i in range(problem.steps):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.detach()
    with optimizer.averaged():
        average = mean_of(model)
    return mean_of(initial), sum(losses[-LAST:]) / LAST, average


def failed(first: float, end: float) -> bool:
    """Above the initial loss, or not finite (which no comparison holds for)."""
    return not end <= first


def main() -> None:
    """Print the failures and their count, write every run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records, failures, start = [], {kind: [0, 0] for kind in arguments.kinds}, time.time()
    for seed in range(arguments.first, arguments.first + arguments.problems):
        problem = draw(seed)
        record: dict[str, Any] = {**asdict(problem), "first": None}
        for kind in arguments.kinds:
            first, end, average = train(problem, kind)
            record |= {"first": first, kind: [end, average]}
            bad = [failed(first, end), failed(first, average)]
            failures[kind] = [a + b for a, b in zip(failures[kind], bad, strict=True)]
            if any(bad):
                print(f"{kind} {first:.4g} -> {end:.4g} ({average:.4g}): {problem}", flush=True)
        records.append(record)
        if seed % 50 == 49 or len(records) == arguments.problems:
            arguments.out.write_text(json.dumps(records))
            print(f"{len(records)} problems, failed (averaged): {failures}; {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
