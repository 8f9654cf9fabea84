"""The demo: each Auto optimizer, once, against a grid of learning rates for its plain counterpart."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoopt_lab.names import DEFAULT, label
from autoopt_lab.processes import each
from autoopt_lab.tasks import Task
from autoopt_lab.train import Run, Setting, train

RATES = tuple(10 ** (half_decade / 2) for half_decade in range(-8, 1))  # the paper's: 10^-4 ... 1


def settings(epochs: int) -> list[Setting]:
    auto = [Setting(name, epochs) for name in DEFAULT]
    return auto + [Setting(name, epochs, rate) for name in DEFAULT.values() for rate in RATES]


def train_all(task: Task, settings: list[Setting], seeds: list[int], workers: int) -> Iterator[Run]:
    """Every setting with every seed, in whatever order they finish."""
    return each(_train, [(task, setting, seed) for seed in seeds for setting in settings], workers)


def _train(job: tuple[Task, Setting, int]) -> Run:
    return train(*job)


@dataclass(frozen=True)
class Result:
    """One setting: the final test error, averaged over the seeds, with its range. NaN: a run diverged."""

    setting: Setting
    error: float  # of the averaged weights where the optimizer keeps them, else of the last
    lowest: float
    highest: float
    last: float  # of the last weights
    seconds: float  # of one run, on average


@dataclass(frozen=True)
class Row:
    """One Auto optimizer against the grid of its counterpart."""

    auto: Result
    best: Result
    median: Result
    worst: Result
    grid: list[Result]  # in the order of the rates


def table(runs: list[Run]) -> list[Row]:
    return [_row(runs, auto, plain) for auto, plain in DEFAULT.items()]


def _row(runs: list[Run], auto: str, plain: str) -> Row:
    rates = sorted({run.setting.lr for run in runs if run.setting.optimizer == plain and run.setting.lr is not None})
    grid = [_result(runs, plain, rate) for rate in rates]
    ranked = sorted(grid, key=lambda result: math.inf if math.isnan(result.error) else result.error)
    return Row(_result(runs, auto, None), ranked[0], ranked[len(ranked) // 2], ranked[-1], grid)


def _result(runs: list[Run], optimizer: str, lr: float | None) -> Result:
    mine = [run for run in runs if (run.setting.optimizer, run.setting.lr) == (optimizer, lr)]
    seconds = sum(run.seconds for run in mine) / len(mine)
    errors = [run.advised_errors[-1] for run in mine]
    last = _mean([run.test_error for run in mine])
    if math.isnan(_mean(errors)):
        return Result(mine[0].setting, math.nan, math.nan, math.nan, last, seconds)
    return Result(mine[0].setting, _mean(errors), min(errors), max(errors), last, seconds)


def _mean(errors: list[float]) -> float:
    return sum(errors) / len(errors) if all(map(math.isfinite, errors)) else math.nan


def percent(error: float) -> str:
    return f"{100 * error:.2f}\N{NO-BREAK SPACE}%" if math.isfinite(error) else "diverged"


def span(result: Result) -> str:
    """The range over the seeds, where there is one."""
    return f"({100 * result.lowest:.2f} – {100 * result.highest:.2f})" if result.lowest < result.highest else ""


def verdict(rows: list[Row], level: float) -> str:
    """One sentence on the final test errors. Differences of up to `level` are called level."""
    clauses = "; ".join(_clause(row, level) for row in rows)
    return f"Test error without a learning rate, of the averaged weights: {clauses}."


def _clause(row: Row, level: float) -> str:
    auto, best, median = row.auto.error, row.best.error, row.median.error
    subject = f"{label(row.auto.setting.optimizer)} {percent(auto)}"
    grid = f"{len(row.grid)} rates for {label(row.best.setting.optimizer)}"
    the_best = f"the best of {grid} ({percent(best)})"
    if math.isnan(best):
        return f"{subject}, all {grid} diverged"
    if math.isnan(auto):
        return f"{subject}, {the_best} did not"
    if abs(auto - best) <= level * (1 + 1e-9):  # the errors are means of shares: rounded
        return f"{subject}, level with {the_best}"
    if auto < best:
        return f"{subject}, better than {the_best}"
    if math.isnan(median) or auto < median:
        return f"{subject}, worse than {the_best} but better than the median rate ({percent(median)})"
    return f"{subject}, worse than {the_best} and no better than the median rate ({percent(median)})"
