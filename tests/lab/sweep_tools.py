"""A sweep of the tiny task, for the tests of the run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autoopt_lab.record import Conditions, Folder, Group, Job, Manifest
from autoopt_lab.sweep import Finished, outstanding, sweep

TASK = str(Path(__file__).with_name("tiny_task.py"))
CONDITIONS = Conditions(epochs=2, average=0.1)


def manifest(seeds: int = 8, conditions: Conditions = CONDITIONS) -> Manifest:
    grid = tuple({"lr": rate, "momentum": momentum} for rate in (0.01, 0.1) for momentum in (0.0, 0.9))
    groups = (
        Group(TASK, "sgd", (4, 8), grid, tuple(range(seeds))),
        Group(TASK, "paper-sgd", (4, 8), ({"smoothing": 0.9},), tuple(range(seeds))),
    )
    return Manifest("tiny", conditions, groups)


def run(
    path: Path,
    wanted: Manifest,
    select: Callable[[Job], bool] = lambda job: True,
    say: Callable[[str], None] = print,
    names: tuple[str, ...] = ("cpu",),
) -> list[Finished]:
    folder = Folder(path)
    with outstanding(folder, wanted, names[0], select, say) as todo:
        return list(sweep(folder, todo, wanted.conditions, names))
