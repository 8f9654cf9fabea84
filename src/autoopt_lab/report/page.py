"""The demo's page: one HTML file that opens from disk without a network."""

import math
import os
import platform
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

import autoopt
from autoopt_lab.demo import Row, percent, span, table, verdict
from autoopt_lab.names import label
from autoopt_lab.report import figures, html
from autoopt_lab.tasks import Task
from autoopt_lab.train import Run, Trace


@dataclass(frozen=True)
class Report:
    """What was run, and on what. Everything the page says is computed from this."""

    task: Task
    runs: list[Run]
    workers: int  # processes, one thread each
    seconds: float  # from the first process started to the last run finished

    @cached_property
    def rows(self) -> list[Row]:
        return table(self.runs)

    @cached_property
    def image(self) -> float:
        """What one test sample weighs in the error."""
        return 1 / len(self.task.data().test_targets)

    @cached_property
    def verdict(self) -> str:
        return verdict(self.rows, level=self.image)

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    def traces(self, optimizer: str) -> dict[str, Trace]:
        """What `optimizer` chose in the run of the first seed."""
        return next(r.traces for r in self.runs if r.setting.optimizer == optimizer and r.seed == self.seeds[0])


def render(report: Report) -> str:
    runs = sorted(report.runs, key=lambda run: (run.setting.optimizer, run.setting.lr or 0, run.seed))
    return html.render(
        "demo.html.j2",
        {"percent": percent, "span": span, "label": label},
        report=report,
        runs=runs,
        setting=runs[0].setting,
        steps=math.ceil(len(report.task.data().train_targets) / runs[0].setting.batch_size),
        curves={row.auto.setting.optimizer: figures.errors(row, runs, report.image / 2) for row in report.rows},
        rates={name: figures.rates(report.traces(name)) for name in _autos(report)},
        momenta={name: figures.momenta(report.traces(name)) for name in _autos(report)},
        versions={"autoopt": autoopt.__version__, "torch": torch.__version__, "Python": platform.python_version()},
        machine=f"{platform.machine()} {platform.system()}, {os.cpu_count()} hardware threads",
    )


def _autos(report: Report) -> list[str]:
    return [row.auto.setting.optimizer for row in report.rows]


def check_writable(folder: Path) -> None:
    """Make the folder; OSError where a file cannot be written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write(report: Report, folder: Path) -> Path:
    return html.write(render(report), folder)
