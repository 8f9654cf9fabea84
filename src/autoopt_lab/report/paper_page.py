"""The page and the Markdown table of the paper's experiment, from stored results alone."""

from __future__ import annotations

from pathlib import Path

from autoopt_lab.names import COUNTERPARTS, LABELS, label
from autoopt_lab.record import Folder
from autoopt_lab.report import html
from autoopt_lab.report.paper_figures import chosen, scatter
from autoopt_lab.results import Results
from autoopt_lab.table2 import FIXED_BATCH, cells, markdown, percent, spread, subject, table2, verdicts

FIGURE3_BATCHES = (32, 64, 256)


def render(results: Results) -> str:
    rows = table2(results)
    have = {(cell.task, cell.optimizer, cell.batch) for cell in cells(results)}
    tasks = list(dict.fromkeys(row.task for row in rows))
    autos = [name for name in LABELS if name in COUNTERPARTS and any(optimizer == name for _, optimizer, _ in have)]
    searched = list(dict.fromkeys(COUNTERPARTS[auto] for auto in autos))
    batches = sorted({batch for *_, batch in have})
    figure4 = FIXED_BATCH if FIXED_BATCH in batches else batches[-1]  # a small version has an N of its own

    def panel(task: str, plain: str, batch: int) -> dict[str, object]:
        drawn = [auto for auto in autos if COUNTERPARTS[auto] == plain]
        figure, diverged = scatter(results, task, plain, drawn, batch)
        missing = f" {diverged} runs diverged and are not drawn." if diverged else ""
        large = " and ".join(label(auto) for auto in drawn)
        return {
            "title": f"{subject(task)}, {label(plain)}, N = {batch}",
            "figure": figure,
            "caption": f"Every run, last weights; large: {large}.{missing}",
        }

    def ran(task: str, plain: str, batch: int) -> bool:
        return any((task, name, batch) in have for name in (plain, *autos) if COUNTERPARTS.get(name, name) == plain)

    return html.render(
        "paper.html.j2",
        {"percent": percent, "spread": spread, "label": label, "subject": subject},
        results=results,
        rows=rows,
        cells=sorted(cells(results), key=lambda cell: (cell.task, cell.optimizer, cell.batch, cell.config)),
        verdicts=verdicts(rows),
        compared=any(row.published for row in rows),
        figure2={
            f"{subject(tasks[0])}, {label(auto)}: {kind}": chosen(results, tasks[0], auto, kind)
            for auto in autos
            if COUNTERPARTS[auto] == searched[0]
            for kind in ("rate", "momentum")
        },
        figure3=[panel("mnist", "sgd", batch) for batch in FIGURE3_BATCHES if ran("mnist", "sgd", batch)],
        figure4=[panel(task, plain, figure4) for task in tasks for plain in searched if ran(task, plain, figure4)],
        conditions=results.manifest.conditions,
    )


def write(results: Results, path: Path) -> tuple[Path, Path]:
    """The page and the Markdown table, in the run folder."""
    folder = Folder(path)
    page, table = path / "index.html", path / "table2.md"
    folder.write_file(page, render(results).encode())
    folder.write_file(table, markdown(table2(results)).encode())
    return page, table
