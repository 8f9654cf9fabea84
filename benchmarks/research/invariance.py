"""Research: what the scale of loss and inputs and the width change, against the seed noise (docs/research.md).

    python benchmarks/research/invariance.py --out FILE [--seeds 5]       # CPU, one core

scikit-learn's digits, 400 steps of 64 samples, an MLP and a CNN, trained by the library. Printed: test error in % of
the last and of the averaged weights, and training loss (mean of the last 20 batches, before it is scaled): mean and
standard deviation over the seeds and, in brackets, the mean change to the plain run of the same seed, which has the
same initial weights (but for the width) and the same order of images.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD
from autoopt_lab.tasks import digits

KINDS: dict[str, Any] = {"sgd": AutoSGD, "adam": AutoAdam, "adagrad": AutoAdaGrad}
STEPS, BATCH, LAST = 400, 64, 20


@dataclass(frozen=True)
class Change:
    """What is multiplied."""

    loss: float = 1.0
    inputs: float = 1.0
    width: int = 1
    first: float = 1.0  # the first layer's initial weight


CHANGES = {
    "plain": Change(), "loss x 1e-3": Change(loss=1e-3), "loss x 1e3": Change(loss=1e3),
    "inputs x 0.1": Change(inputs=0.1), "inputs x 10": Change(inputs=10.0), "width x 4": Change(width=4),
    "inputs x 0.1, first weight x 10": Change(inputs=0.1, first=10.0),
}  # fmt: skip


def mlp(width: int) -> nn.Module:
    """64 - 32 - 32 - 10."""
    size = 32 * width
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10)
    )


def cnn(width: int) -> nn.Module:
    """The demo's, half as wide to be quick."""
    size = 8 * width
    return nn.Sequential(
        nn.Conv2d(1, size, 3), nn.ReLU(), nn.Conv2d(size, 2 * size, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * size, 10),
    )  # fmt: skip


MODELS = {"mlp": mlp, "cnn": cnn}


def run(model_name: str, kind: str, change: Change, seed: int) -> list[float]:
    """Test error in % of the last and of the averaged weights, training loss."""
    torch.manual_seed(seed)
    model = MODELS[model_name](change.width)
    next(model.parameters()).data.mul_(change.first)
    optimizer = KINDS[kind](model)
    losses = train(model, optimizer, seed, change)
    optimizer.detach()
    data = digits.data()
    x, y = change.inputs * data.test_inputs, data.test_targets
    last = test_error(model, x, y)
    with optimizer.averaged():
        return [last, test_error(model, x, y), sum(losses[-LAST:]) / LAST]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, change: Change) -> list[float]:
    """All steps; the loss of each, before it is scaled."""
    data, order = digits.data(), torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(len(data.train_inputs), generator=order) for _ in range(STEPS * BATCH // 1280)]
    losses = []
    for index in torch.cat(epochs).view(STEPS, BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(change.inputs * data.train_inputs[index]), data.train_targets[index])
        (change.loss * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def test_error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In %."""
    return 100 * (model(x).argmax(1) != y).float().mean().item()


def main() -> None:
    """Print one line per model, optimizer and change, write every seed's figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for model in MODELS:
        for kind in KINDS:
            plain: list[list[float]] = []
            for name, change in CHANGES.items():
                start = time.time()
                found = [run(model, kind, change, seed) for seed in range(arguments.seeds)]
                plain = plain or found
                records.append({"model": model, "kind": kind, "change": name, "last, averaged, loss": found})
                words = []
                for column, base in zip(zip(*found, strict=True), zip(*plain, strict=True), strict=True):
                    moved = statistics.fmean(a - b for a, b in zip(column, base, strict=True))
                    words.append(f"{statistics.fmean(column):.3g} ± {statistics.stdev(column):.2g} ({moved:+.2g})")
                print(f"{model} {kind} {name}: last {words[0]}, averaged {words[1]}, loss {words[2]}; "
                      f"{time.time() - start:.0f} s", flush=True)  # fmt: skip
                arguments.out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
