"""Research: rule="robust" on the paper's CNNs for every N, on shifted labels, and with its constants changed.

    python3 benchmarks/research/cells.py --data DIR --out FILE --stage 2 [--minutes 5] [--device cpu --small]

Trains, with the laboratory's vectorised engine, {MNIST, CIFAR-10} x {SGD, Adam, AdaGrad} x N, and a shift of labels at
half time at N = 128. Stage 1: the rule as it was with five seeds, and every change of a constant with two; stage 2:
four bounds of |w| with five seeds each; stage 3: larger steps at the start; stage 4: the shift alone, with thirty
seeds, and with two other bounds of the length of a step with ten; stage 5: the same, with other momenta after it. (What
came later is in them now: the decay by the share of signal and the lighter momentum after a shift in all, first steps
by that share in 3 and 4.) One line of JSON per run (docs/research.md). Chunks of few runs leave a GPU idle, so several
train at once, on streams of their own.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.engine import Plan, Run, robust
from autoopt_lab.engine.evaluate import evaluate
from autoopt_lab.engine.train import Chunk, make_backend
from autoopt_lab.tasks import Data, cifar10, digits, mnist

TASKS = {"mnist": mnist, "cifar10": cifar10, "digits": digits}
NAMES = (
    "LIGHT", "LARGEST", "EARLY", "SIGNAL", "DECAY", "ENOUGH", "LEAST", "CLEAR", "MOST", "WARM_UP", "LONGEST", "GROWTH",
    "WINDOW",
)  # fmt: skip
CONSTANTS = {name: getattr(robust, name) for name in NAMES}
FIRST: dict[str, dict[str, float]] = {  # before |w| was bounded
    "base": {"LARGEST": 0.008},
    "cap 0.005": {"LARGEST": 0.005},
    "cap 0.014": {"LARGEST": 0.014},
    "c 0.14": {"LARGEST": 0.008, "DECAY": 0.14},
    "c 0.28": {"LARGEST": 0.008, "DECAY": 0.28},
    "window 8": {"LARGEST": 0.008, "WINDOW": 8},
    "warm 400": {"LARGEST": 0.008, "WARM_UP": 400},
    "cap 0.014, warm 400": {"LARGEST": 0.014, "WARM_UP": 400},
}
SECOND: dict[str, dict[str, float]] = {  # before larger steps at the start
    "growth 2": {"GROWTH": 2, "LARGEST": 0.008},
    "growth 1": {"GROWTH": 1, "LARGEST": 0.008},
    "growth 1, cap 0.011": {"GROWTH": 1, "LARGEST": 0.011},
    "growth 2, cap 0.006": {"GROWTH": 2, "LARGEST": 0.006},
}
THIRD: dict[str, dict[str, float]] = {  # before the length of a step was bounded
    "early 0.009": {},
    "early 0.014": {"EARLY": 0.014},
    "growth 1, early 0.009": {"GROWTH": 1},
}
FOURTH: dict[str, dict[str, float]] = {
    "longest 1.6": {},
    "longest 1.5": {"LONGEST": 1.5},
    "any length": {"LONGEST": 1e9},
}
FIFTH: dict[str, dict[str, float]] = {
    "light 0.85": {},  # the rule as it is
    "light 0.9": {"LIGHT": 0.9},
    "light 0.8": {"LIGHT": 0.8},
}
VARIANTS: dict[str, dict[str, float]] = {
    **{name: {"GROWTH": 1e9, "SIGNAL": 0, "EARLY": 1, "LONGEST": 1e9, **changed} for name, changed in FIRST.items()},
    **{name: {"SIGNAL": 0, "EARLY": 1, "LONGEST": 1e9, **changed} for name, changed in SECOND.items()},
    **{name: {"LONGEST": 1e9, **changed} for name, changed in THIRD.items()},
    **FOURTH,
    **FIFTH,
}
STAGES = {  # variant -> seeds
    1: {"base": 5, **dict.fromkeys(tuple(FIRST)[1:], 2)},
    2: dict.fromkeys(SECOND, 5),
    3: {**dict.fromkeys(THIRD, 5), "growth 2, cap 0.006": 5},
    4: {**dict.fromkeys(FOURTH, 10), "longest 1.6": 30},
    5: {**dict.fromkeys(FIFTH, 10), "light 0.85": 20},
}
CHANGED = (8, 32, 128)  # N at which the changes were tried at first


@dataclass
class Job:
    """One chunk."""

    task: str
    kind: str
    batch: int
    shift: int | None
    rows: list[tuple[str, int]]  # variant, seed

    def name(self) -> str:
        return f"{self.task} {self.kind} N={self.batch}{' shift' if self.shift else ''}: {len(self.rows)} runs"


def jobs(stage: int, batches: Sequence[int], small: bool) -> list[Job]:
    found = []
    tasks = ("digits",) if small else ("cifar10", "mnist")
    for batch in batches:
        for task in tasks:
            for kind in ("sgd", "adam", "adagrad"):
                every = [(variant, seed) for variant, count in STAGES[stage].items() for seed in range(count)]
                some = every if stage > 1 or batch in CHANGED else [row for row in every if row[0] == "base"]
                if stage < 4:
                    found.append(Job(task, kind, batch, None, some))
                if batch == 128 or small:
                    found.append(Job(task, kind, batch, 5, every))
    return found


class Constants:
    """The rule's constants as one number per run; they are read while a step is captured."""

    def __init__(self, rows: list[tuple[str, int]], device: str) -> None:
        changed = [{**CONSTANTS, **VARIANTS[variant]} for variant, _ in rows]
        self.columns = {name: torch.tensor([[float(c[name])] for c in changed], device=device) for name in CONSTANTS}

    def __enter__(self) -> None:
        for name, column in self.columns.items():
            setattr(robust, name, column)

    def __exit__(self, *_: object) -> None:
        for name, value in CONSTANTS.items():
            setattr(robust, name, value)


def prepared(job: Job, data: Data, options: argparse.Namespace) -> tuple[Chunk, Constants, Any]:
    """A chunk whose kernels are built and whose step is captured."""
    net, device = TASKS[job.task].NET, options.device
    plan = Plan(f"auto-{job.kind}", job.batch, options.epochs, shift_at=job.shift, train_sample=0)
    runs = [Run(seed) for _, seed in job.rows]
    chunk = Chunk(net, data, plan, runs, make_backend("auto", net, device, "tf32"), device, torch.float32)
    constants = Constants(job.rows, device)
    with constants:
        return chunk, constants, captured(chunk, device)


def captured(chunk: Chunk, device: str) -> Any:
    """A stream for a chunk whose step is captured now; None on a CPU."""
    if device != "cuda":
        return None
    chunk._go = chunk.captured()
    evaluate(chunk.backend, chunk.weights, chunk.test_images[:1000], chunk.test_labels[:1000])
    torch.cuda.synchronize()
    return torch.cuda.Stream()


def trained(job: Job, chunk: Chunk, constants: Any, stream: Any, epochs: int, end: float) -> list[dict[str, Any]]:
    """The records, or none if the time is over."""
    start = time.monotonic()
    with nullcontext() if stream is None else torch.cuda.stream(stream), constants if stream is None else nullcontext():
        for epoch in range(epochs):
            chunk.epoch(epoch)
            if stream is not None:
                stream.synchronize()
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
            "momentum": [round(point[1].mean().item(), 4) for point in result.trace[9::10]],  # ten looks, all tensors
        }
        for (variant, seed), result in zip(job.rows, results, strict=True)
    ]  # fmt: skip


def main() -> None:
    """Train, write after every batch size, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int, choices=STAGES, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="digits, to try the script on a CPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--at-once", type=int, default=6)
    options = parser.parse_args()
    train(jobs(options.stage, [32] if options.small else options.batches, options.small), prepared, options)


def train(waiting: list[Job], prepare: Callable[..., tuple[Chunk, Any, Any]], options: argparse.Namespace) -> None:
    """Some jobs at once, until the time is over."""
    end, data = time.monotonic() + 60 * options.minutes, {}
    for name in {job.task for job in waiting}:
        read = TASKS[name].data(options.data)
        data[name] = Data(*(getattr(read, part).to(options.device) for part in Data.__dataclass_fields__))
    records: list[dict[str, Any]] = []
    while waiting and time.monotonic() < end:
        now, waiting = waiting[: options.at_once], waiting[options.at_once :]
        ready = [(job, *prepare(job, data[job.task], options)) for job in now]
        with ThreadPoolExecutor(1 if options.device == "cpu" else len(ready)) as pool:
            for found in pool.map(lambda one: trained(*one, options.epochs, end), ready):
                records += found
        del ready
        options.out.write_text("\n".join(map(json.dumps, records)))
    table(records)


def table(records: list[dict[str, Any]]) -> None:
    """Mean error in per cent, last (averaged); after a shift also one epoch later."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        cells.setdefault((r["task"], r["batch"], r["shift"] or 0, r["variant"], r["kind"]), []).append(r)
    for key, rows in sorted(cells.items(), key=str):

        def mean(part: str, epoch: int, rows: list[dict[str, Any]] = rows) -> float:
            return 100 * sum(r[part][epoch] for r in rows) / len(rows)

        text = f"{mean('test', -1):.2f} ({mean('average', -1):.2f})"
        if key[2]:
            text += f", one epoch after {mean('test', key[2]):.2f} ({mean('average', key[2]):.2f})"
        print(*key, len(rows), text)


if __name__ == "__main__":
    main()
