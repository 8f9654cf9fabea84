"""Research: rule="robust" with a momentum that the noise sets, and with other fixed ones (docs/research.md).

    python3 benchmarks/research/momentum.py --data DIR --out FILE [--batches 8 128] [--seeds 20:24] [--minutes 5]
    python3 benchmarks/research/momentum.py --out FILE --device cpu --small                 # to try the script

The best mixture β u + (1-β) g of what was known and of what is new has β = V/I, I = E|g - u|² being the innovation: how
far the new gradient is from what was expected. Trains the paper's CNNs by the laboratory's vectorised engine, with β
kept between two bounds, one for all tensors or one for each, with and without a step that keeps the reach of the noise.
One line of JSON per run.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from cells import TASKS, Job, table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.engine import Plan, Run, registry
from autoopt_lab.engine.auto import Statistics
from autoopt_lab.engine.evaluate import evaluate
from autoopt_lab.engine.robust import (
    FIRST,
    LONGEST,
    MOMENTUM,
    SMOOTHING,
    WINDOW,
    Robust,
    _smooth,
)  # fmt: skip
from autoopt_lab.engine.rules import AdaGradMetric, AdamMetric, Identity, State, Step, Trace, divided
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
        new, h = self.metric.next(state, gradient, self.option)
        statistics = self.statistics(gradient, second, state["estimate"], h)
        finite, live = statistics.usable()
        spread, total = self.layout.spread, self.layout.total

        alignment, usual, travels = self._travels(state, statistics, live)
        count = state["count"] + 1
        count = torch.where(travels, count / 2, count)
        age = state["age"] + 1
        innovation = self._innovation(state, statistics)
        beta = state["momentum"]  # by what was known before this step
        left, smoothing_power = beta * state["left"], SMOOTHING * state["smoothing_power"]
        estimate = spread(beta) * state["estimate"] + spread(1 - beta) * gradient
        direction = divided(estimate, h) / spread(1 - left)
        now = total(direction * direction)
        size = _smooth(state["size"], now)
        noise = _smooth(state["noise"], self._noise(statistics))
        whole = _smooth(state["gradient"], statistics.gg)
        ratio = self._ratio(count, age, self._signal(noise, whole, live))
        reach = ((1 - beta) / (1 + beta) * (1 + MOMENTUM) / (1 - MOMENTUM)).sqrt()
        ratio = torch.where(self.option["reach"] > 0, ratio * reach, ratio)
        length = torch.maximum(size / (1 - smoothing_power), now / LONGEST**2).sqrt()
        rate = ratio * self._bounded(total(weights * weights), state["start"]) / length
        moved = weights - self.option["lr"] * spread(rate) * direction
        newest = (WINDOW + 1) / (count.clamp_min(1) + WINDOW)
        new |= {
            "estimate": estimate,
            "average": state["average"] + spread(newest) * (moved - state["average"]),
            "age": age,
            "count": count,
            "left": left,
            "momentum_power": MOMENTUM * state["momentum_power"],
            "smoothing_power": smoothing_power,
            "size": size,
            "noise": noise,
            "gradient": whole,
            "alignment": alignment,
            "usual": usual,
            "rate": rate,
            "innovation": innovation,
            "momentum": self._momentum(noise, smoothing_power, innovation, age, live),
        }
        kept = self.keep(finite, live, state, new)
        trace = Trace(self.option["lr"] * kept["rate"], kept["momentum"], statistics.variance / statistics.gg)
        return Step(torch.where(spread(live), moved, weights), kept, trace)

    def _innovation(self, state: State, s: Statistics) -> Tensor:
        """The average of |g - u|²; there is no u at first."""
        correction = 1 - state["left"]
        now = s.gg - 2 * s.gm / correction + s.mm / correction.square()
        return torch.where(state["age"] > 0, _smooth(state["innovation"], now), state["innovation"])

    def _momentum(self, noise: Tensor, power: Tensor, innovation: Tensor, age: Tensor, live: Tensor) -> Tensor:
        """β, (K, L), once it is known."""
        noise, innovation = noise / (1 - power), innovation / (1 - power / SMOOTHING)
        one = torch.where(innovation > 0, noise / innovation, MOMENTUM)
        every = self._mean_ratio(noise, innovation, live).expand_as(one)
        beta = torch.where(self.option["each"] > 0, one, every)
        beta = torch.minimum(torch.maximum(beta, self.option["low"]), self.option["high"])
        start = torch.minimum(torch.maximum(torch.full_like(beta, MOMENTUM), self.option["low"]), self.option["high"])
        return torch.where(age > FIRST, beta, start)


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


def prepared(job: Job, data: Data, options: argparse.Namespace) -> tuple[Chunk, Any]:
    """A chunk whose step is captured."""
    net, device = TASKS[job.task].NET, options.device
    plan = Plan(f"filtered-{job.kind}", job.batch, options.epochs, shift_at=job.shift, train_sample=0)
    runs = [Run(seed, VARIANTS[variant]) for variant, seed in job.rows]
    chunk = Chunk(net, data, plan, runs, make_backend("auto", net, device, "tf32"), device, torch.float32)
    stream = None
    if device == "cuda":
        stream = torch.cuda.Stream()
        chunk._go = chunk.captured()
        evaluate(chunk.backend, chunk.weights, chunk.test_images[:1000], chunk.test_labels[:1000])
        torch.cuda.synchronize()
    return chunk, stream


def trained(job: Job, chunk: Chunk, stream: Any, epochs: int, end: float) -> list[dict[str, Any]]:
    """The records, or none if the time is over."""
    start, betas = time.monotonic(), []
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for epoch in range(epochs):
            chunk.epoch(epoch)
            if stream is not None:
                stream.synchronize()
            betas.append(chunk.state["momentum"].mean(1).tolist())
            if time.monotonic() > end:
                print(f"{job.name()} given up in epoch {epoch}", flush=True)
                return []
        results = chunk.results()
    print(f"{job.name()}, {time.monotonic() - start:.1f} s", flush=True)
    common = {"task": job.task, "kind": job.kind, "batch": job.batch, "shift": job.shift}
    return [
        {
            **common, "variant": variant, "seed": seed,
            "test": [round(e, 5) for e in result.test_error], "train": round(result.train_error[-1], 5),
            "average": [round(e, 5) for e in result.average_test_error],
            "momentum": [round(beta[row], 4) for beta in betas],
        }
        for row, ((variant, seed), result) in enumerate(zip(job.rows, results, strict=True))
    ]  # fmt: skip


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
    end = time.monotonic() + 60 * options.minutes
    data = {}
    for name in ("digits",) if options.small else options.tasks:
        read = TASKS[name].data(options.data)
        data[name] = Data(*(getattr(read, part).to(options.device) for part in Data.__dataclass_fields__))
    waiting, records, lock = jobs(options), [], threading.Lock()
    while waiting and time.monotonic() < end:
        now, waiting = waiting[: options.at_once], waiting[options.at_once :]
        ready = [(job, *prepared(job, data[job.task], options)) for job in now]
        with ThreadPoolExecutor(1 if options.device == "cpu" else len(ready)) as pool:
            for found in pool.map(lambda one: trained(*one, options.epochs, end), ready):
                with lock:
                    records += found
        del ready
        options.out.write_text("\n".join(map(json.dumps, records)))
    table(records)


if __name__ == "__main__":
    main()
