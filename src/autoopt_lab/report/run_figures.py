"""Figures of any run folder: learning curves, and what an automatic optimizer chose for every tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoopt_lab.names import DEFAULT, label
from autoopt_lab.report.figures import AUTO, BEST, OTHER, Figure, drawable, error_ticks, framed
from autoopt_lab.report.paper_figures import FLOOR, SCALE
from autoopt_lab.results import KINDS, Results, Trace
from autoopt_lab.table2 import Cell, percent

MOST_CURVES = 40  # of settings that are neither automatic nor the best


def curves(results: Results, automatic: list[Cell], searched: list[Cell]) -> Figure:
    """Test error of the last weights against the epoch, mean over the seeds: automatic bold (dotted by Algorithm 1),
    the best setting dashed, others faint.

    `searched` begins with the best.
    """
    others = searched[1:]
    step = max(1, -(-len(others) // MOST_CURVES))
    lines = [_curve(results, cell, "other settings", {"color": OTHER, "width": 1}) for cell in others[::step]]
    for line in lines[1:]:
        line["showlegend"] = False
    for cell in searched[:1]:
        lines.append(_curve(results, cell, f"best: {cell.config}", {"color": BEST, "width": 2, "dash": "dash"}))
    for cell in automatic:
        line = {"color": AUTO, "width": 3, "dash": "solid" if cell.optimizer in DEFAULT else "dot"}
        lines.append(_curve(results, cell, f"{label(cell.optimizer)}, N = {cell.batch}", line))
    ticks = error_ticks(value for line in lines for value in line["y"])
    return framed(lines, "epoch", {"title": {"text": "test error"}, "type": "log"} | ticks)


def heat(trace: Trace, kind: str) -> Figure:
    """Every tensor a line, every step a column; rate and noise by their logarithm."""
    values = trace.value[:, KINDS.index(kind)].T.astype(float)
    if kind != "momentum":
        values = np.log10(np.where(values > 0, values, np.nan))
    bar: dict[str, Any] = {"thickness": 10, "title": {"text": kind if kind == "momentum" else f"log₁₀ {kind}"}}
    layer: Figure = {
        "type": "heatmap",
        "x": trace.step.tolist(),
        "y": trace.tensor,
        "z": [drawable(row.tolist()) for row in values],
        "colorscale": [[k / (len(SCALE) - 1), colour] for k, colour in enumerate(SCALE)],
        "colorbar": bar,
        "hovertemplate": "%{y}<br>step %{x}: %{z:.3g}<extra></extra>",
    }
    return framed([layer], "step", {"autorange": "reversed", "automargin": True, "type": "category"})


def lines(trace: Trace, kind: str) -> Figure:
    """The same as lines."""
    shades = [SCALE[round(k * (len(SCALE) - 1) / max(1, len(trace.tensor) - 1))] for k in range(len(trace.tensor))]
    drawn: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": trace.step.tolist(),
            "y": drawable(trace.value[:, KINDS.index(kind), k].tolist()),
            "hovertemplate": f"{name}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
            "line": {"color": shades[k], "width": 1.5, "dash": "dot" if name.endswith("bias") else "solid"},
        }
        for k, name in enumerate(trace.tensor)
    ]
    up: dict[str, Any] = {"title": {"text": kind}}
    return framed(drawn, "step", up if kind == "momentum" else up | {"type": "log", "exponentformat": "power"})


def _curve(results: Results, cell: Cell, name: str, line: dict[str, Any]) -> Figure:
    rows = [
        row
        for row, job in enumerate(results.jobs)
        if job[:3] == (cell.task, cell.optimizer, cell.batch) and dict(job.options) == cell.options
    ]
    means = results.columns["test_error"][rows].mean(0).tolist()
    return {
        "type": "scatter",
        "mode": "lines" if len(means) > 1 else "markers",
        "name": name,
        "x": list(range(1, len(means) + 1)),
        "y": drawable(max(mean, FLOOR) if mean == mean else mean for mean in means),
        "customdata": [percent(mean) for mean in means],
        "hovertemplate": f"{label(cell.optimizer)}, {cell.config}<br>epoch %{{x}}: %{{customdata}}<extra></extra>",
        "line": line,
    }
