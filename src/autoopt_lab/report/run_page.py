"""The page of any run folder: what was found, what it cost, and what was chosen on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from autoopt_lab.record import Folder
from autoopt_lab.report import html
from autoopt_lab.report.figures import Figure
from autoopt_lab.report.run_figures import curves, heat, lines
from autoopt_lab.results import KINDS, Results
from autoopt_lab.table2 import FIXED_BATCH, LABELS, PLAIN, Cell, best, cells, percent, spread


@dataclass(frozen=True)
class Family:
    """An automatic optimizer and the search of its plain counterpart, on one task; either may be missing."""

    task: str
    automatic: list[Cell]
    searched: list[Cell]  # the best first

    @property
    def title(self) -> str:
        optimizers = dict.fromkeys(cell.optimizer for cell in (*self.automatic, *self.searched))
        return f"{_label(self.task)}: {' and '.join(map(_label, optimizers))}"

    @property
    def verdict(self) -> str:
        settings, runs = len(self.searched), sum(cell.seeds for cell in self.searched)
        found = f"best of {settings} settings: {percent(self.searched[0].test.mean)}" if settings else ""
        cost = f"cost of the search: {runs:,} runs" if settings else ""
        own = ""
        if self.automatic:
            cell = chosen(self.automatic)
            own = f"{_label(cell.optimizer)} {percent(cell.test.mean)} (N = {cell.batch}, {cell.seeds} runs)"
        name = _label(self.searched[0].optimizer) if settings else ""
        parts = [own, f"{name}, {found}" if settings else "", cost]
        return f"{_label(self.task)}: {'; '.join(part for part in parts if part)}."


def families(results: Results) -> list[Family]:
    every = cells(results)
    found = []
    for task in dict.fromkeys(cell.task for cell in every):
        mine = [cell for cell in every if cell.task == task]
        names = {PLAIN.get(cell.optimizer, cell.optimizer) for cell in mine}
        for plain in sorted(names, key=lambda name: [*LABELS, name].index(name)):
            automatic = [cell for cell in mine if PLAIN.get(cell.optimizer) == plain]
            searched = [cell for cell in mine if cell.optimizer == plain]
            searched.sort(key=lambda cell: (math.isnan(cell.test.mean), cell.test.mean))
            found.append(Family(task, automatic, searched))
    return found


def chosen(automatic: list[Cell]) -> Cell:
    """The one to speak of: at N = 128, for which nothing was searched, else the best."""
    return best([cell for cell in automatic if cell.batch == FIXED_BATCH] or automatic)


def choices(results: Results, family: Family) -> dict[str, Figure]:
    """What was chosen for every tensor in the first seed's run: by title, a heat map and lines for each kind."""
    if not family.automatic:
        return {}
    cell = chosen(family.automatic)
    jobs = [
        job
        for job in results.traces
        if job[:3] == (cell.task, cell.optimizer, cell.batch) and dict(job.options) == cell.options
    ]
    if not jobs:
        return {}
    trace = results.traces[min(jobs, key=lambda job: job.seed)]
    title = f"{_label(cell.optimizer)}, N = {cell.batch}"
    return {
        f"{title}: {kind}{form}": draw(trace, kind)
        for kind in KINDS
        for form, draw in (("", heat), (", as lines", lines))
    }


def render(results: Results) -> str:
    found = families(results)
    return html.render(
        "run.html.j2",
        {"percent": percent, "spread": spread, "label": _label},
        results=results,
        families=found,
        curves={family.title: curves(results, family.automatic, family.searched) for family in found},
        choices={family.title: choices(results, family) for family in found},
        cells=sorted(cells(results), key=lambda cell: (math.isnan(cell.test.mean), cell.test.mean)),
        conditions=results.manifest.conditions,
    )


def write(results: Results, path: Path) -> Path:
    page = path / "report.html"
    Folder(path).write_file(page, render(results).encode())
    return page


def _label(name: str) -> str:
    return LABELS.get(name, Path(name).stem)
