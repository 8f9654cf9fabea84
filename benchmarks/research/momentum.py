"""Research: rule="robust" with a momentum that the noise sets, and with other fixed ones (docs/research.md).

    python3 benchmarks/research/momentum.py --data DIR --out FILE [--batches 8 128] [--seeds 20:24] [--minutes 5]
    python3 benchmarks/research/momentum.py --out FILE --device cpu --small                 # to try the script

The best mixture β u + (1-β) g of what was known and of what is new has β = V/I, I = E|g - u|² being the innovation: how
far the new gradient is from what was expected. Trains the paper's CNNs by the laboratory's vectorised engine, with β
kept between two bounds, one for all tensors or one for each, with and without a step that keeps the reach of the noise.
One line of JSON per run.
"""

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from cells import TASKS, Job, captured, train
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.engine import Plan, Run, registry
from autoopt_lab.engine.auto import Statistics
from autoopt_lab.engine.robust import FIRST, MOMENTUM, SMOOTHING, Robust, _smooth
from autoopt_lab.engine.rules import AdaGradMetric, AdamMetric, Identity, State, Step
from autoopt_lab.engine.train import Chunk, make_backend
from autoopt_lab.tasks import Data

VARIANTS: dict[str, dict[str, float]] = {
    "0.9": {"low": 0.9, "high": 0.9},
    "0.8, reach": {"low": 0.8, "high": 0.8, "reach": 1},
    "0.95, reach": {"low": 0.95, "high": 0.95, "reach": 1},
    "0.8": {"low": 0.8, "high": 0.8},
    "0.95": {"low": 0.95, "high": 0.95},
    "all 0.8-0.95, reach": {"low": 0.8, "high": 0.95, "reach": 1},
    "all 0.8-0.95": {"low": 0.8, "high": 0.95},
    "all 0.5-0.98, reach": {"low": 0.5, "high": 0.98, "reach": 1},
    "all 0.5-0.95": {"low": 0.5, "high": 0.95},
    "each 0.8-0.95, reach": {"low": 0.8, "high": 0.95, "reach": 1, "each": 1},
    "each 0.8-0.95": {"low": 0.8, "high": 0.95, "each": 1},
}


class Filtered(Robust):
    """The robust rule with β = V/I, between bounds."""

    options: ClassVar[Mapping[str, float]] = {"lr": 1.0, "low": 0.9, "high": 0.9, "reach": 0.0, "each": 0.0}

    def start(self, weights: Tensor) -> State:
        found = super().start(weights)
        zero = found["age"]
        return {**found, "innovation": zero, "momentum": zero + MOMENTUM}

    def step(self, state: State, weights: Tensor, gradient: Tensor, second: Tensor) -> Step:
        done = super().step(state, weights, gradient, second)
        _, h = self.metric.next(state, gradient, self.option)
        statistics = self.statistics(gradient, second, state["estimate"], h)
        finite, live = statistics.usable()
        innovation = self._innovation(state, statistics)
        new = {"innovation": innovation, "momentum": self._next(done.state, innovation, live)}
        return done._replace(state={**done.state, **self.keep(finite, live, state, new)})

    def _momentum(self, state: State, count: Tensor, age: Tensor) -> Tensor:
        return state["momentum"]  # by what was known before this step

    def _reach(self, beta: Tensor) -> Tensor:
        return torch.where(self.option["reach"] > 0, super()._reach(beta), 1.0)

    def _innovation(self, state: State, s: Statistics) -> Tensor:
        """The average of |g - u|²; there is no u at first."""
        correction = 1 - state["left"]
        now = s.gg - 2 * s.gm / correction + s.mm / correction.square()
        return torch.where(state["age"] > 0, _smooth(state["innovation"], now), state["innovation"])

    def _next(self, state: State, innovation: Tensor, live: Tensor) -> Tensor:
        """β of the next step, (K, L), once it is known."""
        power, low, high = state["smoothing_power"], self.option["low"], self.option["high"]
        noise, innovation = state["noise"] / (1 - power), innovation / (1 - power / SMOOTHING)
        one = torch.where(innovation > 0, noise / innovation, MOMENTUM)
        every = self._mean_ratio(noise, innovation, live).expand_as(one)
        beta = torch.where(self.option["each"] > 0, one, every)
        return torch.where(state["age"] > FIRST, beta, MOMENTUM).maximum(low).minimum(high)


for kind, metric in (("sgd", Identity), ("adam", AdamMetric), ("adagrad", AdaGradMetric)):
    registry.RULES[f"filtered-{kind}"] = (Filtered, metric)


def jobs(options: argparse.Namespace) -> list[Job]:
    first, last = map(int, options.seeds.split(":"))
    rows = [(name, seed) for name in options.variants for seed in range(first, last)]
    tasks = ("digits",) if options.small else tuple(options.tasks)
    shifts = {128: (None, 5)}
    return [
        Job(task, kind, batch, shift, rows)
        for batch in ([32] if options.small else options.batches)
        for shift in shifts.get(batch, (None,))
        for task in tasks
        for kind in ("sgd", "adam", "adagrad")
    ]


def prepared(job: Job, data: Data, options: argparse.Namespace) -> tuple[Chunk, Any, Any]:
    """A chunk whose step is captured."""
    net, device = TASKS[job.task].NET, options.device
    plan = Plan(f"filtered-{job.kind}", job.batch, options.epochs, shift_at=job.shift, train_sample=0)
    runs = [Run(seed, VARIANTS[variant]) for variant, seed in job.rows]
    chunk = Chunk(net, data, plan, runs, make_backend("auto", net, device, "tf32"), device, torch.float32)
    return chunk, nullcontext(), captured(chunk, device)


def main() -> None:
    """Train, write as it goes, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 32, 256, 8])
    parser.add_argument("--tasks", nargs="+", default=["cifar10", "mnist"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", default="20:23", help="first:last, without the last")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="digits, to try the script on a CPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--at-once", type=int, default=6)
    options = parser.parse_args()
    train(jobs(options), prepared, options)


if __name__ == "__main__":
    main()
