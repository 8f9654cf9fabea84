"""The page and the Markdown table of the paper's experiment, from stored results alone."""

from __future__ import annotations

from pathlib import Path

from autoopt_lab.record import Folder
from autoopt_lab.report import html
from autoopt_lab.report.paper_figures import chosen, scatter
from autoopt_lab.results import Results
from autoopt_lab.table2 import FIXED_BATCH, LABELS, PLAIN, cells, markdown, percent, spread, table2, verdicts

FIGURE3_BATCHES = (32, 64, 256)


def render(results: Results) -> str:
    rows = table2(results)
    have = {(cell.task, cell.optimizer, cell.batch) for cell in cells(results)}
    tasks = list(dict.fromkeys(row.task for row in rows))
    autos = [name for name in PLAIN if any(optimizer == name for _, optimizer, _ in have)]
    batches = sorted({batch for *_, batch in have})
    figure4 = FIXED_BATCH if FIXED_BATCH in batches else batches[-1]  # a small version has an N of its own

    def panel(task: str, auto: str, batch: int) -> dict[str, object]:
        figure, diverged = scatter(results, task, PLAIN[auto], auto, batch)
        title = f"{LABELS.get(task, task)}, {LABELS[PLAIN[auto]]}, N = {batch}"
        missing = f" {diverged} runs diverged and are not drawn." if diverged else ""
        return {"title": title, "figure": figure, "caption": f"Every run; large: {LABELS[auto]}.{missing}"}

    return html.render(
        "paper.html.j2",
        {"percent": percent, "spread": spread, "label": _label},
        results=results,
        rows=rows,
        cells=sorted(cells(results), key=lambda cell: (cell.task, cell.optimizer, cell.batch, cell.config)),
        verdicts=verdicts(rows),
        compared=any(row.published for row in rows),
        figure2={
            f"{LABELS.get(task, task)}, {LABELS[auto]}: {kind}": chosen(results, task, auto, kind)
            for task, auto in [(tasks[0], autos[0])]
            for kind in ("rate", "momentum")
        }
        if autos
        else {},
        figure3=[
            panel("mnist", "auto-sgd", batch)
            for batch in FIGURE3_BATCHES
            if {("mnist", "sgd", batch), ("mnist", "auto-sgd", batch)} & have
        ],
        figure4=[panel(task, auto, figure4) for task in tasks for auto in autos if (task, auto, figure4) in have],
        conditions=results.manifest.conditions,
    )


def _label(name: str) -> str:
    return LABELS.get(name, name)


def write(results: Results, path: Path) -> tuple[Path, Path]:
    """The page and the Markdown table, in the run folder."""
    folder = Folder(path)
    page, table = path / "index.html", path / "table2.md"
    folder.write_file(page, render(results).encode())
    folder.write_file(table, markdown(table2(results)).encode())
    return page, table
