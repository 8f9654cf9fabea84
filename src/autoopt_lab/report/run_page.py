"""The page of any run folder: what was found, what it cost, and what was chosen on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from autoopt_lab.names import COUNTERPARTS, LABELS, label
from autoopt_lab.record import Folder
from autoopt_lab.report import html
from autoopt_lab.report.figures import Figure
from autoopt_lab.report.run_figures import curves, heat, lines
from autoopt_lab.results import KINDS, Results
from autoopt_lab.table2 import FIXED_BATCH, Cell, best, cells, percent, spread, subject, weights


@dataclass(frozen=True)
class Family:
    """Automatic optimizers and the search of their plain counterpart, on one task; either may be missing."""

    task: str
    automatic: list[Cell]
    searched: list[Cell]  # the best first

    @property
    def title(self) -> str:
        optimizers = dict.fromkeys(cell.optimizer for cell in (*self.automatic, *self.searched))
        return f"{subject(self.task)}: {' and '.join(map(label, optimizers))}"

    @property
    def verdict(self) -> str:
        settings, runs = len(self.searched), sum(cell.seeds for cell in self.searched)
        parts = [
            f"{label(cell.optimizer)} {percent(cell.advised.mean)} (N = {cell.batch}, {weights(cell)}, "
            f"{cell.seeds} runs)"
            for cell in chosen(self.automatic)
        ]
        if settings:
            first = self.searched[0]
            parts.append(f"{label(first.optimizer)}, best of {settings} settings: {percent(first.test.mean)}")
            parts.append(f"cost of the search: {runs:,} runs")
        return f"{subject(self.task)}: {'; '.join(parts)}."


def families(results: Results) -> list[Family]:
    every = cells(results)
    found = []
    for task in dict.fromkeys(cell.task for cell in every):
        mine = [cell for cell in every if cell.task == task]
        names = {COUNTERPARTS.get(cell.optimizer, cell.optimizer) for cell in mine}
        for plain in sorted(names, key=lambda name: [*LABELS, name].index(name)):
            automatic = [cell for cell in mine if COUNTERPARTS.get(cell.optimizer) == plain]
            searched = [cell for cell in mine if cell.optimizer == plain]
            searched.sort(key=lambda cell: (math.isnan(cell.test.mean), cell.test.mean))
            found.append(Family(task, automatic, searched))
    return found


def chosen(automatic: list[Cell]) -> list[Cell]:
    """Of each optimizer the one to speak of: at N = 128, for which nothing was searched, else the best."""
    found = []
    for name in sorted({cell.optimizer for cell in automatic}):
        mine = [cell for cell in automatic if cell.optimizer == name]
        found.append(best([cell for cell in mine if cell.batch == FIXED_BATCH] or mine))
    return found


def choices(results: Results, family: Family) -> dict[str, Figure]:
    """What was chosen for every tensor in the first seed's run: by title, a heat map and lines for each kind."""
    figures = {}
    for cell in chosen(family.automatic):
        jobs = [
            job
            for job in results.traces
            if job[:3] == (cell.task, cell.optimizer, cell.batch) and dict(job.options) == cell.options
        ]
        for trace in [results.traces[job] for job in sorted(jobs, key=lambda job: job.seed)[:1]]:
            title = f"{label(cell.optimizer)}, N = {cell.batch}"
            for kind in KINDS:
                figures[f"{title}: {kind}"] = heat(trace, kind)
                figures[f"{title}: {kind}, as lines"] = lines(trace, kind)
    return figures


def render(results: Results) -> str:
    found = families(results)
    return html.render(
        "run.html.j2",
        {"percent": percent, "spread": spread, "label": label, "subject": subject},
        results=results,
        families=found,
        curves={family.title: curves(results, family.automatic, family.searched) for family in found},
        choices={family.title: choices(results, family) for family in found},
        cells=sorted(cells(results), key=lambda cell: (math.isnan(cell.advised.mean), cell.advised.mean)),
        conditions=results.manifest.conditions,
    )


def write(results: Results, path: Path) -> Path:
    page = path / "report.html"
    Folder(path).write_file(page, render(results).encode())
    return page
