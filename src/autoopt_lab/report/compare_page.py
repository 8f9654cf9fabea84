"""The page of `autoopt compare`, and the same as Markdown and JSON beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoopt_lab.compare import HEADINGS, Comparison, Row, markdown, shown, verdict
from autoopt_lab.peers import METHODS, versions
from autoopt_lab.provenance import provenance
from autoopt_lab.record import Folder
from autoopt_lab.report import html
from autoopt_lab.report.figures import AUTO, LAYERS, Figure, drawable, error_ticks, framed
from autoopt_lab.report.paper_figures import FLOOR
from autoopt_lab.table2 import percent

AUTO_DASHES = {"auto-sgd": "solid", "auto-adam": "dash", "auto-adagrad": "dot"}
DASHES = ("solid", "dash", "dot")
PEERS = tuple(colour for colour in LAYERS if colour != AUTO)


def curves(comparison: Comparison) -> Figure:
    """Test error against the epoch, mean over the seeds, of the weights that the authors say to evaluate."""
    peers = [row for row in comparison.rows if row.name not in AUTO_DASHES]
    lines = [
        _curve(comparison, row, {"color": PEERS[k % len(PEERS)], "width": 1.5, "dash": DASHES[k // len(PEERS) % 3]})
        for k, row in enumerate(peers)
    ]
    for row in comparison.rows:
        if row.name in AUTO_DASHES:
            lines.append(_curve(comparison, row, {"color": AUTO, "width": 4, "dash": AUTO_DASHES[row.name]}))
    return framed(lines, "epoch", _error_axis(value for line in lines for value in line["y"]))


def prices(comparison: Comparison) -> Figure:
    """The final error against the time of a step; what failed is not there."""
    rows = [row for row in comparison.rows if math.isfinite(row.advised.mean) and math.isfinite(row.time)]
    points: Figure = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [round(row.time, 3) for row in rows],
        "y": [max(row.advised.mean, FLOOR) for row in rows],
        "text": [row.method.label for row in rows],
        "customdata": [percent(row.advised.mean) for row in rows],
        "textposition": ["top center" if k % 2 else "bottom center" for k in range(len(rows))],
        "textfont": {"size": 10},
        "hovertemplate": "%{text}<br>%{x:.2f} × SGD's step: %{customdata}<extra></extra>",
        "marker": {"size": 10, "color": [AUTO if row.name in AUTO_DASHES else PEERS[0] for row in rows]},
    }
    return framed([points], "time of a step, as a multiple of plain SGD's", _error_axis(points["y"]))


def _error_axis(values: Iterable[float | None]) -> dict[str, Any]:
    return {"title": {"text": "test error"}, "type": "log"} | error_ticks(values)


def _curve(comparison: Comparison, row: Row, line: dict[str, Any]) -> Figure:
    runs = [run.advised for run in comparison.of(row.name)]
    means = [sum(errors) / len(errors) for errors in zip(*runs, strict=False)]  # a failed run ends the line
    return {
        "type": "scatter",
        "mode": "lines" if len(means) > 1 else "markers",
        "name": row.method.label,
        "x": list(range(1, len(means) + 1)),
        "y": drawable(max(mean, FLOOR) if math.isfinite(mean) else mean for mean in means),
        "customdata": [percent(mean) for mean in means],
        "hovertemplate": f"{row.method.label}<br>epoch %{{x}}: %{{customdata}}<extra></extra>",
        "line": line,
    }


def render(comparison: Comparison) -> str:
    return html.render(
        "compare.html.j2",
        {},
        comparison=comparison,
        headings=HEADINGS,
        rows=[(row, shown(row)) for row in comparison.rows],
        verdict=verdict(comparison),
        figures={"Learning curves": curves(comparison), "Error and price": prices(comparison)},
        left_out=[(METHODS[name].label, METHODS[name].package) for name in comparison.left_out],
        versions=versions(row.name for row in comparison.rows),
        made=provenance("cpu"),
    )


def write(comparison: Comparison, path: Path) -> Path:
    """The page; the table as Markdown and every number as JSON go beside it."""
    folder, page = Folder(path), path / "index.html"
    plan = asdict(comparison.plan) | {"data": None if comparison.plan.data is None else str(comparison.plan.data)}
    numbers = {
        "plan": plan,
        "made": provenance("cpu"),
        "versions": versions(row.name for row in comparison.rows),
        "outcomes": [asdict(run) for row in comparison.rows for run in comparison.of(row.name)],
        "costs": {name: asdict(cost) for name, cost in comparison.costs.items()},
        "weights_bytes": comparison.weights,
        "left_out": comparison.left_out,
    }
    folder.write_file(path / "results.json", json.dumps(_plain(numbers), indent=1).encode())
    folder.write_file(path / "table.md", markdown(comparison).encode())
    folder.write_file(page, render(comparison).encode())
    return page


def _plain(value: Any) -> Any:
    """JSON knows no NaN: null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
