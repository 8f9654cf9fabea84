"""The price of automatic tuning: step time and peak memory, as ratios over the plain torch step of the same run.

    make bench
    python benchmarks/step_time.py --out docs/results/step_time.json
    python benchmarks/step_time.py --compile    # the steps of both compiled by torch.compile; takes minutes more

The paper's MNIST CNN, 128 samples, one CPU thread. A step is forward, backward and optimizer step. The optimizers take
turns within each round, so that a slow moment of the machine hits all of them, and the median of the rounds' ratios is
taken. Time is that of the process on its CPU: what other processes do to the clock does not count, what they do to the
caches does. Peak memory is what the step allocates on top of the model, by torch's profiler.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD
from autoopt_lab.memory import allocated

SAMPLES, WARMUP, ROUNDS, BURST = 128, 5, 150, 3
FEW = 2  # samples, with which hardly anything is computed
PHASES = ("forward", "backward", "step")


def mnist_cnn() -> nn.Module:
    """The paper's network for MNIST, section 5."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10), nn.LogSoftmax(1),
    )  # fmt: skip


class Trained:
    """A model and an optimizer, and the time that each phase of their steps took."""

    def __init__(self, make: Callable[[nn.Module], Any], x: Tensor, y: Tensor, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = mnist_cnn()
        self.optimizer = make(self.model)
        self.update: Callable[[], object] = self.optimizer.step
        self.x, self.y = x, y
        self.step()
        if compiled:
            self.update = torch.compile(self.optimizer.step)
        for _ in range(WARMUP):
            self.step()
        self.rounds: list[list[float]] = []  # of each round, the seconds of a step in each phase

    def step(self) -> list[float]:
        clock = [time.process_time()]
        self.optimizer.zero_grad()
        loss = F.nll_loss(self.model(self.x), self.y)
        clock.append(time.process_time())
        loss.backward()
        clock.append(time.process_time())
        self.update()
        clock.append(time.process_time())
        return [end - start for start, end in itertools.pairwise(clock)]

    def round(self) -> None:
        steps = [self.step() for _ in range(BURST)]
        self.rounds.append([statistics.fmean(phase) for phase in zip(*steps, strict=True)])

    def phases(self) -> dict[str, float]:
        """Medians, in milliseconds."""
        times = zip(*self.rounds, strict=True)
        return {phase: statistics.median(seconds) * 1e3 for phase, seconds in zip(PHASES, times, strict=True)}


def measure(samples: int, *, compiled: bool) -> dict[str, Any]:
    """Of each optimizer: milliseconds by phase beside the plain one's, and the ratios."""
    x, y = torch.randn(samples, 1, 28, 28), torch.randint(0, 10, (samples,))
    pairs = {
        "AutoSGD": (lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9), AutoSGD),
        "AutoAdam": (lambda m: torch.optim.Adam(m.parameters(), lr=0.001), AutoAdam),
        "AutoAdaGrad": (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01), AutoAdaGrad),
    }
    trained = {name: [Trained(make, x, y, compiled=compiled) for make in pair] for name, pair in pairs.items()}
    for _ in range(ROUNDS):
        for pair in trained.values():
            for one in pair:
                one.round()
    return {
        name: {
            "plain_ms": plain.phases(),
            "auto_ms": auto.phases(),
            "time": statistics.median(sum(a) / sum(p) for a, p in zip(auto.rounds, plain.rounds, strict=True)),
            "memory": allocated(auto.step).peak / allocated(plain.step).peak,
        }
        for name, (plain, auto) in trained.items()
    }


def main() -> None:
    """Print the tables; write them, if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--compile", action="store_true", help="compile the steps of both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found, fixed = (measure(samples, compiled=options.compile) for samples in (SAMPLES, FEW))
    conditions = (
        f"MNIST CNN, N={SAMPLES}, one CPU thread, {'compiled steps, ' if options.compile else ''}"
        f"process time, median of {ROUNDS} rounds of {BURST} steps; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    print(f"{'':12} {'time':>7} {'memory':>7}   " + "   ".join(f"{phase:>27}" for phase in PHASES))
    for name, row in found.items():
        phases = "   ".join(
            f"{row['plain_ms'][p]:6.2f} -> {row['auto_ms'][p]:6.2f} ({extra(fixed[name], p):5.2f}) ms" for p in PHASES
        )
        print(f"{name:12} {row['time']:6.2f}x {row['memory']:6.2f}x   {phases}")
    print(f"{conditions}. In brackets: what is added with {FEW} samples, the cost of Python and of small kernels.")
    if options.out:
        figures = {"conditions": conditions, "optimizers": found, f"optimizers at N={FEW}": fixed}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def extra(row: dict[str, Any], phase: str) -> float:
    """What a phase takes longer than the plain one, in milliseconds."""
    difference: float = row["auto_ms"][phase] - row["plain_ms"][phase]
    return difference


if __name__ == "__main__":
    main()
