"""Trains what a manifest wants and no part of its folder holds, chunk by chunk, on one device or several."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from autoopt_lab import devices
from autoopt_lab.engine import RULES, Net, Plan, Result, Run, train
from autoopt_lab.names import COUNTERPARTS
from autoopt_lab.provenance import provenance
from autoopt_lab.record import Columns, Conditions, Folder, Job, Manifest, Part, three_digits
from autoopt_lab.tasks import Data

TASKS = ("digits", "mnist", "cifar10")
SAMPLES = 16384  # in one step of all runs of a chunk on a GPU


class SweepError(Exception):
    """A sweep that cannot be run; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Finished:
    """A chunk that is in the folder now, or was given up for want of time."""

    jobs: list[Job]
    seconds: float
    samples: int  # trained on, all runs together
    done: bool


# -- what to run ---------------------------------------------------------------------------------------------------


def check(manifest: Manifest) -> None:
    """SweepError for an optimizer or an option that the engine does not know, before anything is written."""
    for group in manifest.groups:
        if group.optimizer not in RULES:
            raise SweepError(f"there is no optimizer {group.optimizer!r}: choose one of {', '.join(RULES)}")
        rule, metric = RULES[group.optimizer]
        known = {**rule.options, **metric.options}
        if unknown := sorted({option for options in group.settings for option in options} - set(known)):
            raise SweepError(f"{group.optimizer} has no option {unknown[0]!r}: it knows {', '.join(known)}")


def widest(batch: int, device: str, samples: int = SAMPLES) -> int:
    """How many runs train side by side: enough to fill a GPU; on a CPU, where they queue, few, to lose little."""
    return max(1, min(1024, samples // batch)) if device.startswith("cuda") else 4


def chunks(jobs: Sequence[Job], width: Callable[[int], int]) -> list[list[Job]]:
    """Runs of one task, optimizer and batch size together; first seeds first, and batches near the paper's 128."""
    shapes: dict[tuple[str, str, int], list[Job]] = {}
    for job in jobs:
        shapes.setdefault(job[:3], []).append(job)
    cut = []
    for (_, _, batch), same in shapes.items():
        same.sort(key=lambda job: job.seed)  # stable: settings keep their order
        pieces = math.ceil(len(same) / width(batch))
        cut += [same[len(same) * k // pieces : len(same) * (k + 1) // pieces] for k in range(pieces)]
    return sorted(cut, key=lambda chunk: (chunk[0].seed, abs(math.log2(chunk[0].batch / 128))))


def check_rate(optimizer: str, given: bool) -> None:
    """SweepError unless the plain optimizers, and not the automatic ones, are given a rate."""
    if given and optimizer in COUNTERPARTS:
        raise SweepError(f"{optimizer} takes no learning rate: leave --lr away")
    if not given and optimizer in COUNTERPARTS.values():
        raise SweepError(f"{optimizer} needs a learning rate: give --lr")


def check_batch(batch: int, data: Data, task: str) -> None:
    """SweepError where there are fewer training samples than a batch holds."""
    if batch > len(data.train_targets):
        raise SweepError(f"a batch of {batch} does not fit the {len(data.train_targets)} training samples of {task}")


# -- one chunk -----------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    part: Part | None  # None: it was given up, because it would not have ended before the deadline
    seconds: float
    samples: int


@cache
def subject(task: str, conditions: Conditions, folder: Path | None, device: str) -> tuple[Net, Data]:
    """The net and its data, on the device."""
    module = _module(task)
    net, read = getattr(module, "NET", None), getattr(module, "data", None)
    if not isinstance(net, Net) or not callable(read):
        raise SweepError(f"the task {task} must define NET, an engine Net, and data(folder), as tasks/mnist.py does")
    data = read(folder)
    train_part, test_part = slice(conditions.train_samples), slice(conditions.test_samples)
    on_device = Data(
        data.train_inputs[train_part].to(device),
        data.train_targets[train_part].to(device),
        data.test_inputs[test_part].to(device),
        data.test_targets[test_part].to(device),
    )
    if device.startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()  # other streams read it
    return net, on_device


def _module(task: str) -> ModuleType:
    if task in TASKS:
        return importlib.import_module(f"autoopt_lab.tasks.{task}")
    path = Path(task)
    if path.suffix != ".py" or not path.is_file():
        raise SweepError(f"there is no task {task!r}: choose {', '.join(TASKS)} or a Python file of your own")
    return module_of(path)


def module_of(path: Path) -> ModuleType:
    """A Python file of the user's own; SweepError where it cannot be run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's: anything can go wrong in it
        raise SweepError(f"{path} fails with {type(error).__name__}: {str(error).splitlines()[0]}") from None
    return module


class _GivenUpError(Exception):
    pass


def train_chunk(jobs: list[Job], conditions: Conditions, folder: Path | None, deadline: float) -> Trained:
    """Train runs of one task, optimizer and batch size side by side, on this process's device."""
    task, optimizer, batch, *_ = jobs[0]
    device = devices.here.device
    net, data = subject(task, conditions, folder, device)
    check_batch(batch, data, task)
    plan = Plan(optimizer, batch, conditions.epochs, conditions.average, train_sample=0)  # a part has the last alone
    runs = [Run(job.seed, dict(job.options)) for job in jobs]
    samples = len(jobs) * conditions.epochs * (len(data.train_targets) // batch) * batch
    ends = [time.monotonic()]

    def on_epoch(epoch: int) -> None:
        if device.startswith("cuda"):
            torch.cuda.current_stream(device).synchronize()  # or the clock would show when the work was handed over
        ends.append(time.monotonic())
        # The first epoch builds kernels, too, and any is slow while many chunks share a device: the fastest one counts
        fastest = min((end - start for start, end in itertools.pairwise(ends[1:])), default=0.0)
        left = (conditions.epochs - epoch) * fastest
        if epoch < conditions.epochs and (ends[-1] + left > deadline or devices.here.stopping()):
            raise _GivenUpError

    try:
        results = train(
            net,
            data,
            plan,
            runs,
            device=device,
            precision=conditions.precision,
            compile_update=conditions.compile_update,
            on_epoch=on_epoch,
        )
    except _GivenUpError:
        return Trained(None, ends[-1] - ends[0], samples)
    seconds = time.monotonic() - ends[0]
    made = provenance(device) | {"seconds": round(seconds, 3), "conditions": asdict(conditions)}
    return Trained(Part(_columns(jobs, results), _trace(net, results), made), seconds, samples)


def _columns(jobs: list[Job], results: list[Result]) -> Columns:
    options = sorted({name for job in jobs for name, _ in job.options})
    values = [dict(job.options) for job in jobs]
    return {
        "task": np.array([job.task for job in jobs]),
        "optimizer": np.array([job.optimizer for job in jobs]),
        "batch": np.array([job.batch for job in jobs], np.int32),
        "seed": np.array([job.seed for job in jobs], np.int32),
        **{name: np.array([value.get(name, np.nan) for value in values]) for name in options},
        "test_error": np.array([r.test_error for r in results], np.float32),
        "train_error": np.array([r.train_error[-1] for r in results], np.float32),
        "average_test_error": np.array([(r.average_test_error or [np.nan])[-1] for r in results], np.float32),
        "test_loss": np.array([r.test_loss[-1] for r in results], np.float32),
        "train_loss": np.array([r.train_loss[-1] for r in results], np.float32),
    }


def _trace(net: Net, results: list[Result]) -> Columns:
    values = [r.trace.float().numpy() for r in results if r.trace is not None]
    if not values:
        return {}
    return {
        "step": np.array(results[0].trace_steps, np.int32),
        "tensor": np.array(net.names),
        "value": three_digits(np.stack(values)),
    }


# -- all of them ---------------------------------------------------------------------------------------------------


@contextmanager
def outstanding(
    folder: Folder,
    manifest: Manifest,
    device: str,
    select: Callable[[Job], bool] = lambda job: True,
    say: Callable[[str], None] = print,
    samples: int = SAMPLES,
) -> Iterator[list[list[Job]]]:
    """Begin the folder or go on with it; gives the chunks to train. A damaged part is named, removed and redone."""
    check(manifest)
    by = device if torch.cuda.is_available() else "cpu"  # who asks a cluster for its GPUs may have none
    with folder.writing(manifest, provenance(by)):
        parts, damaged = folder.parts()
        for path, sentence in damaged.items():
            say(sentence)
            with folder.os_errors():
                path.unlink()
        done = {job for part in parts for job in part.jobs()}
        todo = [job for job in manifest.jobs() if job not in done and select(job)]
        yield chunks(todo, lambda batch: widest(batch, device, samples))


def sweep(
    folder: Folder,
    todo: Sequence[list[Job]],
    conditions: Conditions,
    on: devices.Pool | Sequence[str],
    data: Path | None = None,
    deadline: float = math.inf,
) -> Iterator[Finished]:
    """Train the chunks, each on the first device that is free, and put each into the folder when it is finished.

    `on` is a pool, or the names of devices of this machine.
    `deadline` is of time.monotonic(): a chunk that would not end before it is not begun, as far as that is known.
    """
    waiting = list(todo)
    longest: dict[tuple[str, str, int], float] = {}  # seconds of a chunk of this shape
    running: dict[Future[Trained], list[Job]] = {}
    try:
        with nullcontext(on) if isinstance(on, devices.Pool) else devices.processes(on) as pool:
            while waiting or running:
                while waiting and len(running) < pool.places():
                    chunk = waiting.pop(0)
                    if time.monotonic() + longest.get(chunk[0][:3], 0) < deadline:
                        running[pool.submit(train_chunk, chunk, conditions, data, deadline)] = chunk
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    chunk = running.pop(future)
                    part, seconds, samples = future.result()
                    if part:
                        folder.add(part)
                    shape = chunk[0][:3]
                    longest[shape] = max(longest.get(shape, 0), seconds) if part else math.inf
                    yield Finished(chunk, seconds, samples, part is not None)
    except BrokenProcessPool:
        raise SweepError("a training process was killed, perhaps for memory: free some, and run it again") from None
