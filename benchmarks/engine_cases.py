"""What the engine's benchmarks have in common: the nets, the batch sizes, how a chunk is made and a call timed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from autoopt_lab.engine import Net, Plan, Run
from autoopt_lab.engine.train import Backend, Chunk
from autoopt_lab.tasks import Data, cifar10, mnist

NETS = {"cifar10": cifar10.NET, "mnist": mnist.NET}
TASKS = {"cifar10": cifar10, "mnist": mnist}
BATCHES = (8, 16, 32, 64, 128, 256)
OPTIONS: dict[str, dict[str, float]] = {"sgd": {"lr": 0.01, "momentum": 0.9}, "adam": {}, "adagrad": {}}


def log(*words: object) -> None:
    print(*words, flush=True)


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """A part that fails is reported, and the rest goes on."""
    try:
        yield
    except Exception:
        log(f"--- FAILED: {what}")
        traceback.print_exc(file=sys.stdout)
        torch.cuda.synchronize()


def fused(net: Net, precision: str = "tf32x3") -> Any:
    from autoopt_lab.engine.fused import Fused

    return Fused(net, precision)


def random_data(net: Net, samples: int, device: str) -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *net.image, generator=generator).to(device)
    targets = torch.randint(net.classes, (samples,), generator=generator).to(device)
    return Data(inputs, targets, inputs[: samples // 5], targets[: samples // 5])


def runs_for(batch: int) -> int:
    return min(1024, 16384 // batch)


def make(net: Net, data: Data, rule: str, runs: int, batch: int, backend: Backend, **options: Any) -> Chunk:
    rows = [Run(seed % 8, OPTIONS.get(rule, {})) for seed in range(runs)]
    return Chunk(net, data, Plan(rule, batch, epochs=1), rows, backend, "cuda", torch.float32, **options)


def milliseconds(go: Callable[[], object], repeats: int) -> float:
    go()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        go()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats
