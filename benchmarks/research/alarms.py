"""Research: in which of the stored runs of the paper's experiment n, the steps since the data changed, was halved.

    python benchmarks/research/alarms.py [docs/results/paper.tar]
    python benchmarks/research/alarms.py --again docs/results/cells_15.jsonl docs/results/cells_16.jsonl ...

n is read off the momentum that the trace holds, β = 0.85 + 0.05 n/t. A run in which it was never halved after the
hundredth step, from which on the second test for shifts speaks, is the same with a second test that is harder to pass
(docs/research.md, "Which of the 360 runs the new test can have changed"). Nothing shifts in these runs. With `--again`:
the 36 cells by the rule as it is, from the stored runs that are the same and from those files (of `on_cpu.py`).
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.names import COUNTERPARTS, label
from autoopt_lab.pack import unpack
from autoopt_lab.paper import PLAIN
from autoopt_lab.record import Folder
from autoopt_lab.results import Results, load
from autoopt_lab.table2 import TASKS, cells

LIGHT, MOMENTUM, USUAL = 0.85, 0.9, 100  # as in autoopt.oracle.relative
LATE = 1000  # steps; what comes before is the way from the start
LARGE = 128  # N from which on an alarm there is the same by both tests, in all of those that were tried
MARGINS = {"mnist": 0.001, "cifar10": 0.01}  # that the last weights may be above the grid


class Error(NamedTuple):
    """Of the averaged and of the last weights of a run."""

    average: float
    last: float


Runs = dict[tuple[str, int], Error]
"""TASK/OPTIMIZER/N and seed -> the errors."""


def halvings(steps: np.ndarray, beta: np.ndarray) -> list[int]:
    """The last stored step before each time that n fell behind t, after the first USUAL steps; (points,) each."""
    n = (beta - LIGHT) / (MOMENTUM - LIGHT) * (steps + 1) - 1  # the trace has β of the step to come
    slack = 2 + 0.01 * steps  # stored values are rounded; a halving is far more
    first = int(np.argmax(steps > USUAL))
    found = [0] if n[first] < steps[first] - USUAL - slack[first] else []
    grown, passed = np.diff(n)[first:], np.diff(steps)[first:]
    return found + [int(steps[first + i]) for i in np.nonzero(grown < passed - slack[first + 1 :])[0]]


def halved(folder: Path) -> dict[tuple[str, str, int], list[tuple[int, list[int]]]]:
    """Task, optimizer and N -> of each run the seed, and when n was halved."""
    found: dict[tuple[str, str, int], list[tuple[int, list[int]]]] = defaultdict(list)
    for file in folder.rglob("*-auto-*.npz"):
        part = np.load(file)
        beta = np.median(part["trace.value"][:, :, 1].astype(float), 2)  # one for all tensors
        names = zip(*(part[f"column.{name}"].tolist() for name in ("task", "optimizer", "batch")), strict=True)
        for cell, seed, row in zip(names, part["column.seed"].tolist(), beta, strict=True):
            found[cell].append((seed, halvings(part["trace.step"].astype(float), row)))
    return found


def alarms(folder: Path) -> None:
    """Print, for each cell, the runs with an alarm on the way from the start, and those with one later."""
    found, untouched = halved(folder), 0
    for cell, runs in sorted(found.items()):
        late = sorted(seed for seed, when in runs if any(step > LATE for step in when))
        early = sorted(seed for seed, when in runs if when and seed not in late)
        untouched += len(runs) - len(late) - len(early)
        print(*cell, f"early {early}, late {late}")
    print(f"{untouched} of {sum(map(len, found.values()))} runs without any")


def stored(results: Results) -> Iterator[tuple[tuple[str, int], Error]]:
    """The runs of the default rule."""
    averages, tests = results.columns["average_test_error"], results.columns["test_error"][:, -1]
    for row, job in enumerate(results.jobs):
        if job.optimizer.startswith("auto-"):
            yield (f"{job.task}/{job.optimizer}/{job.batch}", job.seed), Error(float(averages[row]), float(tests[row]))


def trained(file: Path) -> Iterator[tuple[tuple[str, int], Error]]:
    """The plain runs of one file; the oldest have an error for each epoch."""
    for line in file.read_text().splitlines():
        run: dict[str, Any] = json.loads(line)
        kind = run.get("optimizer") or f"auto-{run.get('kind')}"
        cell = run.get("cell") or f"{run['task']}/{kind}/{run['batch']}"
        if not run.get("shift") and (run.get("inputs", 1), run.get("loss", 1)) == (1, 1):
            yield (
                (cell, run["seed"]),
                Error(*(e[-1] if isinstance(e := run[n], list) else e for n in ("average", "test"))),
            )


def table(results: Results, again: Runs, other: set[tuple[str, int]]) -> None:
    """Print each cell beside the best of the grid, in %: mean and deviation over the seeds, and how many are new.

    `other` are the stored runs that the rule as it is would do otherwise.
    """
    best: dict[tuple[str, str, int], float] = defaultdict(lambda: math.inf)
    for cell in cells(results):
        key = cell.task, cell.optimizer, cell.batch
        best[key] = min(best[key], math.inf if math.isnan(cell.test.mean) else cell.test.mean)
    runs: Runs = {run: error for run, error in stored(results) if run not in other} | again
    met = {"averaged": 0, "last": 0, "last, within the margin": 0}
    names = {(*cell.split("/"),) for cell, _ in runs}
    order = sorted(
        names, key=lambda name: (list(TASKS).index(name[0]), PLAIN.index(COUNTERPARTS[name[1]]), int(name[2]))
    )
    print("| | N | best of the grid | averaged | last | seeds | of these new |\n|---|---|---|---|---|---|---|")
    for task, optimizer, batch in order:
        name = f"{task}/{optimizer}/{batch}"
        grid = best[task, COUNTERPARTS[optimizer], int(batch)]
        chosen = [error for (cell_name, _), error in runs.items() if cell_name == name]
        average, last = (statistics.fmean(errors) for errors in zip(*chosen, strict=True))
        deviations = [statistics.stdev(errors) for errors in zip(*chosen, strict=True)]
        met["averaged"] += average <= grid
        met["last"] += last <= grid
        met["last, within the margin"] += last <= grid + MARGINS[task]
        new = sum(cell_name == name for cell_name, _ in again)
        shown = (f"{100 * e:.2f} ± {100 * d:.2f}" for e, d in zip((average, last), deviations, strict=True))
        what = f"{TASKS[task]}, {label(COUNTERPARTS[optimizer])}"
        print(f"| {what} | {batch} | {100 * grid:.2f} | {' | '.join(shown)} | {len(chosen)} | {new} |")
    print(f"of {len(names)} cells at or below the grid: {met}")


def main() -> None:
    """Print one or the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tar", type=Path, nargs="?", default=Path("docs/results/paper.tar"))
    parser.add_argument("--again", type=Path, nargs="+", help="files of runs to put in the place of stored ones")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        unpack(given.tar, Folder(Path(place)))
        if given.again is None:
            alarms(Path(place))
        else:
            other = {
                (f"{task}/{optimizer}/{batch}", seed)
                for (task, optimizer, batch), runs in halved(Path(place)).items()
                for seed, when in runs
                if (when and batch < LARGE) or any(step > LATE for step in when)
            }
            table(load(Path(place))[0], dict(run for file in given.again for run in trained(file)), other)


if __name__ == "__main__":
    main()
