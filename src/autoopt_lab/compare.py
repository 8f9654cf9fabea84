"""The tuning-free optimizers side by side on one task: error, and the price of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from autoopt_lab.names import DEFAULT
from autoopt_lab.peers import METHODS, Method, Training
from autoopt_lab.processes import each
from autoopt_lab.single import load_task
from autoopt_lab.step_cost import REFERENCE, Cost, in_a_line
from autoopt_lab.table2 import Spread, percent, spread
from autoopt_lab.tasks import Task


@dataclass(frozen=True)
class Plan:
    """What every optimizer is put through."""

    task: str
    epochs: int
    batch: int
    seeds: tuple[int, ...]
    data: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """One run: test errors after every epoch. NaN: diverged; too few: it failed with an exception on the way."""

    optimizer: str
    seed: int
    last: list[float]
    averaged: list[float]  # empty where the method says nothing of averaging
    failure: str = ""

    @property
    def advised(self) -> list[float]:
        """Of the weights its authors say to evaluate."""
        return self.averaged if METHODS[self.optimizer].averages else self.last


@dataclass(frozen=True)
class Row:
    """One optimizer in the table. Spreads are over the seeds, NaN where a single one diverged or failed."""

    name: str
    method: Method
    last: Spread
    averaged: Spread | None
    advised: Spread
    time: float  # as multiples of plain SGD's, as is the memory
    memory: float
    state: float  # as multiples of the weights
    reads: float
    failed: bool  # with an exception, in training
    failures: list[str]


@dataclass(frozen=True)
class Comparison:
    """All that was found; table, page and text are made of this alone."""

    plan: Plan
    description: str
    outcomes: list[Outcome]
    costs: dict[str, Cost]
    weights: int  # bytes
    left_out: list[str]

    @property
    def rows(self) -> list[Row]:
        """The lowest error first, what failed last."""
        rows = [self._row(name) for name in {outcome.optimizer for outcome in self.outcomes}]
        return sorted(rows, key=lambda row: (math.inf if math.isnan(row.advised.mean) else row.advised.mean, row.name))

    def of(self, name: str) -> list[Outcome]:
        return sorted((run for run in self.outcomes if run.optimizer == name), key=lambda run: run.seed)

    def _row(self, name: str) -> Row:
        runs, cost, plain, method = self.of(name), self.costs[name], self.costs[REFERENCE], METHODS[name]
        return Row(
            name,
            method,
            _over_seeds([_final(run, run.last, self.plan.epochs) for run in runs]),
            _over_seeds([_final(run, run.averaged, self.plan.epochs) for run in runs]) if method.averages else None,
            _over_seeds([_final(run, run.advised, self.plan.epochs) for run in runs]),
            cost.time,
            cost.peak / (plain.peak or math.nan),
            cost.state / (self.weights or math.nan),
            cost.reads,
            any(run.failure for run in runs),
            _failures(runs, cost),
        )


def comparison(plan: Plan, outcomes: list[Outcome], costs: dict[str, Cost], left_out: list[str]) -> Comparison:
    task = load_task(plan.task, plan.data)
    weights = sum(weight.nbytes for weight in task.model().parameters())
    return Comparison(plan, task.description, outcomes, costs, weights, left_out)


def train(plan: Plan, job: tuple[str, int]) -> Outcome:
    """One run: a pure function of the task, the optimizer and the seed, which fix weights and batches."""
    name, seed = job
    task = load_task(plan.task, plan.data)
    data = task.data()
    last: list[float] = []
    averaged: list[float] = []
    order = torch.Generator().manual_seed(seed)  # of its own: a model with dropout sees the same batches
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            training = Training(task, METHODS[name], task.model())
            for _ in range(plan.epochs):
                batches = torch.randperm(len(data.train_targets), generator=order).split(plan.batch)
                for batch in batches:
                    training.step(data.train_inputs[batch], data.train_targets[batch])
                last.append(_error(task, training.model))
                if training.method.averages:
                    with training.averaged(data.train_inputs[batch] for batch in batches) as model:
                        averaged.append(_error(task, model))
        except Exception as error:  # another's code: whatever goes wrong in it is a result
            return Outcome(name, seed, last, averaged, in_a_line(error))
    return Outcome(name, seed, last, averaged)


def train_all(plan: Plan, names: Sequence[str], workers: int) -> Iterator[Outcome]:
    return each(partial(train, plan), [(name, seed) for seed in plan.seeds for name in names], workers)


def _error(task: Task, model: nn.Module) -> float:
    data = task.data()
    model.eval()
    with torch.no_grad():
        error = task.error(model(data.test_inputs), data.test_targets)
    model.train()
    return error


def _final(run: Outcome, errors: list[float], epochs: int) -> float:
    return errors[-1] if len(errors) == epochs and not run.failure else math.nan


def _over_seeds(errors: list[float]) -> Spread:
    deviation = statistics.stdev(errors) if len(errors) > 1 and all(map(math.isfinite, errors)) else math.nan
    return Spread(statistics.fmean(errors), deviation)


def _failures(runs: list[Outcome], cost: Cost) -> list[str]:
    said = [f"seed {run.seed}: {run.failure}" for run in runs if run.failure]
    diverged = [str(run.seed) for run in runs if not run.failure and not math.isfinite(run.advised[-1])]
    said += [f"diverged with seed {', '.join(diverged)}"] if diverged else []
    return said + ([f"measuring a step: {cost.failure}"] if cost.failure else [])


def verdict(comparison: Comparison) -> str:
    """The winner, and where the automatic optimizers came in; each by the weights that its authors say to evaluate."""
    rows = comparison.rows
    best, total = rows[0], len(rows)
    if math.isnan(best.advised.mean):
        return f"None of the {total} optimizers reached the end."
    said = [f"Lowest test error of {total}: {best.method.label}, {_quoted(best)}"]
    for rank, row in enumerate(rows, 1):
        if row.name in DEFAULT and row is not best:
            place = "did not reach the end" if math.isnan(row.advised.mean) else _quoted(row)
            said.append(f"{row.method.label} {place}, rank {rank}")
    return "; ".join(said) + "."


def _quoted(row: Row) -> str:
    return f"{percent(row.advised.mean)} ({'last' if row.averaged is None else 'averaged'} weights)"


HEADINGS = ("Optimizer", "Last weights", "Averaged", "Time", "Memory", "State", "Reads", "Failures")


def shown(row: Row) -> tuple[str, ...]:
    """A row as text; the error that its authors would quote is `Averaged` where there is one."""
    return (
        row.method.label,
        "failed" if row.failed else spread(row.last),
        "" if row.averaged is None else "failed" if row.failed else spread(row.averaged),
        _times(row.time),
        _times(row.memory),
        f"{row.state:.1f}" if math.isfinite(row.state) else "–",
        f"{row.reads:.0f}" if math.isfinite(row.reads) else "–",
        "; ".join(row.failures),
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if math.isfinite(ratio) else "–"


def markdown(comparison: Comparison) -> str:
    """The table for the documentation."""
    lines = [f"| {' | '.join((*HEADINGS[:1], 'Setting', *HEADINGS[1:]))} |", "|---" * (len(HEADINGS) + 1) + "|"]
    for row in comparison.rows:
        label, *rest = (text.replace("|", "\\|") for text in shown(row))
        lines.append(f"| {' | '.join((label, row.method.setting, *rest))} |")
    return "\n".join(lines) + "\n"
