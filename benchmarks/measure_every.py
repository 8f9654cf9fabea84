"""What measure_every=k saves, and what it does to the result: SGD and Adam, k = 1, 2, 4, 8, 16.

    python benchmarks/measure_every.py --out docs/results/measure_every.json     # CPU, one thread, about five minutes
    python benchmarks/measure_every.py --table docs/results/measure_every.json   # prints it again

Cost: the paper's MNIST CNN, 128 samples, as a ratio over torch.optim. A step is forward, backward and optimizer step.
All take turns within each round, sixteen steps at a time (whole periods of every k), and the median over the rounds of
the ratio within a round is printed, so that a slow moment of the machine hits all of them.

Result: the demo's task (scikit-learn's digits, 400 steps of 64 samples), the final test error in %, of the averaged
weights under the default rule and of the last weights under the paper's: mean and range over the seeds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from step_time import SAMPLES, Trained

from autoopt import AutoAdam, AutoSGD
from autoopt_lab.provenance import provenance
from autoopt_lab.tasks import digits

KINDS: dict[str, Any] = {"sgd": AutoSGD, "adam": AutoAdam}
PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.001),
}
EVERY = (1, 2, 4, 8, 16)
ROUNDS, BURST = 40, 16
EPOCHS, BATCH, SEEDS = 20, 64, (0, 1, 2)


def cost(rounds: int) -> list[dict[str, Any]]:
    """The ratio of every kind and k, in every round."""
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,))
    made = {(kind, 0): make for kind, make in PLAIN.items()}
    made |= {(kind, k): partial(make, measure_every=k) for kind, make in KINDS.items() for k in EVERY}
    steps = {key: Trained(make, x, y, compiled=False).step for key, make in made.items()}
    for step in steps.values():  # through the first k steps, all of which measure
        for _ in range(2 * BURST):
            step()
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            start = time.process_time()
            for _ in range(BURST):
                step()
            times[key].append((time.process_time() - start) / BURST)
    ratios = {key: [a / b for a, b in zip(times[key], times[key[0], 0], strict=True)] for key in steps if key[1]}
    return [{"kind": kind, "every": k, "ratios": found} for (kind, k), found in ratios.items()]


def error(kind: str, rule: str, every: int, seed: int) -> float:
    """The final test error in %, of the weights that one would evaluate."""
    data, task = digits.data(), digits.task
    torch.manual_seed(seed)
    model = task.model()
    optimizer = KINDS[kind](model, rule=rule, measure_every=every, average=rule == "robust")
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(data.train_targets), generator=order).split(BATCH):
            optimizer.zero_grad()
            task.loss(model(data.train_inputs[batch]), data.train_targets[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        if rule == "paper":
            return 100 * task.error(model(data.test_inputs), data.test_targets)
        with optimizer.averaged():
            return 100 * task.error(model(data.test_inputs), data.test_targets)


def table(found: dict[str, Any]) -> None:
    """Print what was measured."""
    for row in found["cost"]:
        low, middle, high = statistics.quantiles(row["ratios"], n=4)
        print(f"{row['kind']:5} every {row['every']:2}: time {middle:.2f} (quartiles {low:.2f} to {high:.2f})")
    for row in found["error"]:
        errors = row["errors"]
        print(f"{row['kind']:5} {row['rule']:6} every {row['every']:2}: error {statistics.fmean(errors):.2f} % "
              f"({min(errors):.2f} to {max(errors):.2f})")  # fmt: skip


def main() -> None:
    """Measure and write, or print what was written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    if arguments.table is not None:
        table(json.loads(arguments.table.read_text()))
        return
    torch.set_num_threads(1)
    found = {
        "made": provenance("cpu"),
        "cost": cost(arguments.rounds),
        "error": [
            {"kind": kind, "rule": rule, "every": k, "errors": [error(kind, rule, k, seed) for seed in SEEDS]}
            for kind in KINDS
            for rule in ("robust", "paper")
            for k in EVERY
        ],
    }
    table(found)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
