"""Table 2 of the paper from stored results, with the paper's figures beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autoopt_lab.names import COUNTERPARTS, DEFAULT, LABELS, label
from autoopt_lab.results import Results

TASKS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
FIXED_BATCH = 128  # of the paper's Figure 4: an automatic run that nothing was chosen for
LIMIT = 2.0  # standard deviations


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the seeds, as shares; one seed has no deviation, NaN."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class Published:
    train: Spread
    test: Spread
    config: str


def _percent(train: float, train_deviation: float, test: float, test_deviation: float, config: str) -> Published:
    train_, test_ = (Spread(m / 100, d / 100) for m, d in ((train, train_deviation), (test, test_deviation)))
    return Published(train_, test_, config)


PAPER: Mapping[tuple[str, str], Published] = {
    ("mnist", "sgd"): _percent(1.17, 0.14, 1.21, 0.11, "rate 10⁻², momentum 0"),
    ("mnist", "paper-sgd"): _percent(1.10, 0.05, 1.22, 0.16, "automatic"),
    ("mnist", "adam"): _percent(1.05, 0.05, 1.14, 0.04, "rate 10⁻³·⁵, momentum 0.9"),
    ("mnist", "paper-adam"): _percent(1.34, 0.11, 1.35, 0.12, "automatic"),
    ("mnist", "adagrad"): _percent(1.75, 0.38, 1.86, 0.18, "rate 10⁻²"),
    ("mnist", "paper-adagrad"): _percent(1.15, 0.10, 1.23, 0.12, "automatic"),
    ("cifar10", "sgd"): _percent(26.4, 1.39, 36.4, 0.85, "rate 10⁻¹·⁵, momentum 0.99"),
    ("cifar10", "paper-sgd"): _percent(30.0, 1.33, 38.7, 1.56, "automatic"),
    ("cifar10", "adam"): _percent(27.2, 1.58, 36.4, 1.03, "rate 10⁻³·⁵, momentum 0.9"),
    ("cifar10", "paper-adam"): _percent(42.6, 3.29, 47.8, 2.69, "automatic"),
    ("cifar10", "adagrad"): _percent(31.4, 2.92, 38.3, 1.31, "rate 10⁻¹·⁵"),
    ("cifar10", "paper-adagrad"): _percent(27.3, 1.44, 36.7, 0.82, "automatic"),
}


@dataclass(frozen=True)
class Cell:
    """One setting of one optimizer: the final errors over the seeds. NaN: a seed diverged.

    `test` and `train` are of the last weights.
    """

    task: str
    optimizer: str
    batch: int
    options: Mapping[str, float]
    seeds: int
    diverged: int
    test: Spread
    train: Spread
    averaged: Spread | None = None  # test error of the averaged weights, where they were averaged

    @property
    def advised(self) -> Spread:
        """Of the weights to evaluate: the default rule's own average, else the last."""
        return self.averaged if self.averaged and self.optimizer in DEFAULT else self.test

    @property
    def config(self) -> str:
        names = {"lr": "rate", "smoothing": "υ", "beta2": "β₂"}
        chosen = [f"N = {self.batch}"]
        chosen += [f"{names.get(n, n)} {number(v)}" for n, v in self.options.items() if n not in ("beta2", "eps")]
        return ", ".join(chosen)


@dataclass(frozen=True)
class Row:
    """One line of Table 2."""

    task: str
    optimizer: str
    label: str
    ours: Cell
    searched: int  # settings the choice was made from
    left_out: int  # settings with fewer seeds than the others, which took no part in it
    published: Published | None

    @property
    def differences(self) -> dict[str, float]:
        """Of the means, in the paper's standard deviations; by "test" and "train"."""
        if self.published is None:
            return {}
        pairs = {"test": (self.ours.test, self.published.test), "train": (self.ours.train, self.published.train)}
        return {name: (ours.mean - paper.mean) / paper.deviation for name, (ours, paper) in pairs.items()}

    @property
    def remark(self) -> str:
        """Where ours is more than LIMIT of the paper's standard deviations σ away from the paper's."""
        said = []
        for name, difference in self.differences.items():
            if math.isnan(difference):
                said.append(f"{name} error: a seed diverged")
            elif abs(difference) > LIMIT:
                side = "lower" if difference < 0 else "higher"
                said.append(f"{name} error {abs(difference):.1f} σ {side}")
        return "; ".join(said)


def cells(results: Results) -> list[Cell]:
    groups: dict[tuple[str, str, int, tuple[tuple[str, float], ...]], list[int]] = {}
    for row, job in enumerate(results.jobs):
        groups.setdefault((job.task, job.optimizer, job.batch, job.options), []).append(row)
    test, train = results.columns["test_error"][:, -1], results.columns["train_error"]
    averaged = results.columns["average_test_error"]
    return [
        Cell(
            task,
            optimizer,
            batch,
            dict(options),
            len(rows),
            int(np.isnan(test[rows]).sum()),
            _spread(test[rows]),
            _spread(train[rows]),
            None if np.isnan(averaged[rows]).all() else _spread(averaged[rows]),
        )
        for (task, optimizer, batch, options), rows in groups.items()
    ]


def table2(results: Results) -> list[Row]:
    """The setting with the lowest mean test error, as the paper chooses; the automatic ones at N = 128, too.

    Of the default rule, that is the error of the weights it averages.

    Results of a smaller experiment have nothing of the paper's beside them.
    """
    order, groups = [*TASKS, *LABELS], dict[tuple[str, str], list[Cell]]()
    for cell in cells(results):
        groups.setdefault((cell.task, cell.optimizer), []).append(cell)
    ranked = sorted(groups, key=lambda names: [order.index(n) if n in order else len(order) for n in names])
    return [row for names in ranked for row in _rows(groups[names], _like_the_papers(results))]


def _like_the_papers(results: Results) -> bool:
    conditions = results.manifest.conditions
    return (conditions.epochs, conditions.train_samples, conditions.test_samples) == (10, None, None)


def _rows(mine: list[Cell], comparable: bool) -> list[Row]:
    task, optimizer = mine[0].task, mine[0].optimizer
    published = PAPER.get((task, optimizer)) if comparable else None
    full = [cell for cell in mine if cell.seeds == max(cell.seeds for cell in mine)]
    chosen = best(full)
    name, left_out = label(optimizer), len(mine) - len(full)
    if optimizer not in COUNTERPARTS or len(mine) == 1:
        return [Row(task, optimizer, name, chosen, len(full), left_out, published)]
    fixed = [Row(task, optimizer, name, cell, 1, 0, published) for cell in mine if cell.batch == FIXED_BATCH]
    return [*fixed, Row(task, optimizer, f"{name}, best N", chosen, len(full), left_out, published)]


def best(some: list[Cell]) -> Cell:
    return min(some, key=lambda cell: math.inf if math.isnan(cell.advised.mean) else cell.advised.mean)


def verdicts(rows: list[Row]) -> list[str]:
    """A sentence for each automatic optimizer that has the search of its counterpart beside it."""
    said = []
    for row in rows:
        searched = [r for r in rows if (r.task, r.optimizer) == (row.task, COUNTERPARTS.get(row.optimizer))]
        if searched and row.searched == 1:
            (grid,) = searched
            said.append(
                f"{subject(row.task)}, {row.label}: {percent(row.ours.advised.mean)} test error without a learning "
                f"rate (N = {row.ours.batch}, {weights(row.ours)}); the best of {grid.searched} settings of "
                f"{grid.label} {percent(grid.ours.test.mean)}, found with {grid.searched * grid.ours.seeds:,} runs."
            )
    return said


def weights(cell: Cell) -> str:
    """Whose error a verdict quotes."""
    return "averaged weights" if cell.advised is cell.averaged else "last weights"


def subject(task: str) -> str:
    """A task for people: the paper's by their names, a user's own by its file's."""
    return TASKS.get(task, Path(task).stem)


def markdown(rows: list[Row]) -> str:
    """Table 2 for the documentation."""
    lines = [
        "| data | optimizer | settings | test error | averaged weights | paper | train error | paper | our setting "
        "| paper's | remark |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        paper = row.published
        cells = (
            subject(row.task),
            row.label,
            str(row.searched),
            spread(row.ours.test),
            spread(row.ours.averaged) if row.ours.averaged else "",
            spread(paper.test) if paper else "",
            spread(row.ours.train),
            spread(paper.train) if paper else "",
            row.ours.config,
            paper.config if paper else "",
            row.remark,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def percent(error: float) -> str:
    return f"{100 * error:.2f}\N{NO-BREAK SPACE}%" if math.isfinite(error) else "diverged"


def spread(errors: Spread) -> str:
    if math.isnan(errors.deviation):  # one seed, or one that diverged
        return percent(errors.mean)
    return f"{100 * errors.mean:.2f} ± {100 * errors.deviation:.2f} %".replace(" ", "\N{NO-BREAK SPACE}")


def _spread(errors: np.ndarray) -> Spread:
    values = errors.astype(float)
    return Spread(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan)


def number(value: float) -> str:
    """Half decades as powers of ten, as the paper writes them."""
    exponent = 2 * math.log10(value) if value > 0 else 0.5
    if value not in (0.1, 1.0) and math.isclose(exponent, round(exponent), abs_tol=1e-9):
        return "10" + f"{exponent / 2:g}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:.5g}"
