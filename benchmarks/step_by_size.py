"""What optimizer.step() alone takes on one CPU thread, by the size of the model, ours beside torch's.

    python benchmarks/step_by_size.py [--out docs/results/step_by_size.json]

MLPs, 8 samples, the step's own process time in milliseconds, median of the steps after the first five. The optimizers
take turns, a step each, so that a slow moment of the machine hits all of them.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD

SAMPLES, WARMUP = 8, 5
SIZES = ((64, 3, 200), (256, 8, 100), (1024, 10, 25))  # width, hidden layers, steps
MAKES: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.001, momentum=0.9),
    "AutoSGD": AutoSGD,
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.001),
    "AutoAdam": AutoAdam,
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.001),
    "AutoAdaGrad": AutoAdaGrad,
}


class Trained:
    """An MLP under one optimizer."""

    def __init__(self, make: Callable[[nn.Module], Any], width: int, depth: int) -> None:
        torch.manual_seed(0)
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*hidden, nn.Linear(width, 10))
        self.optimizer = make(self.model)
        self.x, self.y = torch.randn(SAMPLES, width), torch.randint(0, 10, (SAMPLES,))

    def step(self) -> float:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()
        start = time.process_time()
        self.optimizer.step()
        return 1e3 * (time.process_time() - start)


def measure(width: int, depth: int, steps: int) -> dict[str, Any]:
    trained = {name: Trained(make, width, depth) for name, make in MAKES.items()}
    times = [{name: one.step() for name, one in trained.items()} for _ in range(steps)][WARMUP:]
    weights = sum(parameter.numel() for parameter in trained["SGD"].model.parameters())
    return {"weights": weights, "ms": {name: statistics.median(t[name] for t in times) for name in MAKES}}


def main() -> None:
    """Print the table; write it, if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(*size) for size in SIZES]
    print(f"{'weights':>12}" + "".join(f"{name:>13}" for name in MAKES) + "   (ms)")
    for row in found:
        print(f"{row['weights']:12,}" + "".join(f"{ms:13.2f}" for ms in row["ms"].values()))
    if options.out:
        conditions = f"one CPU thread; torch {torch.__version__}, Python {platform.python_version()}"
        options.out.write_text(json.dumps({"conditions": conditions, "sizes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
