"""The laboratory under load: ten thousand tiny settings on two cores, a full disk, killed workers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from autoopt_lab.record import Conditions, Folder, Group, Job, Manifest, RecordError
from autoopt_lab.results import Results
from autoopt_lab.results import load as load_results
from autoopt_lab.sweep import Finished, SweepError, outstanding, sweep
from trust.soak import PAGE, slope

TASK = str(Path(__file__).parents[1] / "tests" / "lab" / "tiny_task.py")
RATES = 100  # settings of each seed
CORES = ("cpu", "cpu")


@dataclass(frozen=True)
class Load:
    """What came of it."""

    settings: int  # of the sweep that was left alone
    slope: float  # bytes of all its processes per setting, after the first tenth
    disturbed: int  # settings of the sweep that was not
    full_disks: int
    killed_workers: int
    lost: int  # settings that were reported done and are not in the folder
    different: int  # settings whose result is not that of the quiet sweep


def manifest(settings: int) -> Manifest:
    rates = tuple({"lr": 10 ** (-4 + 4 * k / RATES)} for k in range(RATES))
    return Manifest("load", Conditions(epochs=1), (Group(TASK, "sgd", (8,), rates, tuple(range(settings // RATES))),))


def run(path: Path, wanted: Manifest) -> Iterator[Finished]:
    with outstanding(Folder(path), wanted, CORES[0]) as todo:
        yield from sweep(Folder(path), todo, wanted.conditions, CORES)


def memory() -> int:
    """Bytes of this process and its workers."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE for pid in pids)


def quiet(path: Path, settings: int) -> float:
    """A sweep that is left alone; bytes per setting."""
    done, seen = 0, []
    for number, chunk in enumerate(run(path, manifest(settings))):
        done += len(chunk.jobs)
        if done > settings / 10 and number % 10 == 0:
            seen.append((done, memory()))
    assert done == settings
    return slope(seen)


def disturbed(path: Path, settings: int, seed: int) -> tuple[int, int, int]:
    """A sweep that is disturbed again and again; (full disks, killed workers, settings lost)."""
    chance, wanted = random.Random(seed), manifest(settings)
    full = killed = 0
    reported: set[Job] = set()
    lost: set[Job] = set()
    there: set[Job] = set()
    while len(there) < settings:
        assert full + killed < settings, "the sweep does not get on"
        after = chance.randrange(5, 60)
        try:
            if (full + killed) % 2:
                killed += 1
                lose_a_worker(path, wanted, after, reported)
            else:
                full += 1
                with mock.patch.object(os, "fsync", full_after(after)):
                    reported.update(job for chunk in run(path, wanted) for job in chunk.jobs)
        except (RecordError, SweepError):  # one sentence for the user, who then runs it again
            pass
        there = {job for part in Folder(path).parts()[0] for job in part.jobs()}
        lost |= reported - there
    return full, killed, len(lost)


def lose_a_worker(path: Path, wanted: Manifest, after: int, reported: set[Job]) -> None:
    for number, chunk in enumerate(run(path, wanted)):
        reported.update(chunk.jobs)
        if number == after:
            victim = multiprocessing.active_children()[0].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)


class full_after:  # noqa: N801 - stands for a function
    """os.fsync until the disk is full."""

    def __init__(self, calls: int) -> None:
        self.calls, self.real = calls, os.fsync

    def __call__(self, descriptor: int) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.real(descriptor)


def errors_of(results: Results) -> dict[Job, float]:
    return dict(zip(results.jobs, results.columns["train_loss"].tolist(), strict=True))


def load(settings: int = 10_000) -> Load:
    """Both sweeps."""
    few = settings // 5
    with tempfile.TemporaryDirectory() as left, tempfile.TemporaryDirectory() as hit:
        grown = quiet(Path(left), settings)
        full, killed, lost = disturbed(Path(hit), few, seed=3)
        expected, found = (errors_of(load_results(Path(path))[0]) for path in (left, hit))
        different = sum(not np.array_equal(expected[job], value, equal_nan=True) for job, value in found.items())
    return Load(settings, grown, few, full, killed, lost, different + few - len(found))


if __name__ == "__main__":
    print(load(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
