"""Figures 2, 3 and 4 of the paper from stored results, as plotly specifications."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from autoopt_lab.names import DEFAULT, label
from autoopt_lab.record import Job
from autoopt_lab.report.figures import AUTO, BEST, Figure, drawable, framed, tick_labels
from autoopt_lab.results import KINDS, Results
from autoopt_lab.table2 import number, percent

# From dark blue to yellow, the lowest rate to the highest: readable on a light and on a dark page.
SCALE = ("#5b4fa2", "#4a6fb0", "#3a8bad", "#37a49a", "#52b788", "#8bc34a", "#c2b92f", "#d99a1c", "#c96a3a")
FLOOR = 1e-5  # an error of zero is drawn here
TICKS = [t for d in range(-5, 1) for t in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if t <= 1]


def chosen(results: Results, task: str, optimizer: str, kind: str) -> Figure:
    """Figure 2: the rate or momentum of the first layer's weights against the step, a curve for every N."""
    jobs = [job for job in results.traces if (job.task, job.optimizer) == (task, optimizer)]
    first: dict[int, Job] = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        first.setdefault(job.batch, job)
    lines: list[Figure] = []
    for rank, (batch, job) in enumerate(sorted(first.items())):
        trace = results.traces[job]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"N = {batch}",
                "x": trace.step.tolist(),
                "y": drawable(trace.value[:, KINDS.index(kind), 0].tolist()),
                "hovertemplate": f"N = {batch}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
                "line": {"color": SCALE[round(rank * (len(SCALE) - 1) / max(1, len(first) - 1))], "width": 1.5},
            }
        )
    figure = framed(lines, "step", {"title": {"text": "learning rate" if kind == "rate" else kind}})
    figure["layout"]["xaxis"] |= {"type": "log", "exponentformat": "power", "dtick": 1}
    return figure


def scatter(results: Results, task: str, plain: str, autos: Iterable[str], batch: int) -> tuple[Figure, int]:
    """Figures 3 and 4: test against train error of every run at one N, and how many diverged and are not drawn.

    All of the last weights. `autos` are the automatic optimizers to draw with the grid of the plain one.
    """
    columns = results.columns
    here = (columns["task"] == task) & (columns["batch"] == batch)
    finite = np.isfinite(columns["test_error"][:, -1]) & np.isfinite(columns["train_error"])
    searched = here & (columns["optimizer"] == plain)
    rates = sorted(set(columns["lr"][searched].tolist())) if "lr" in columns else []
    points = [
        _points(results, searched & finite & (columns["lr"] == rate), number(rate), SCALE[k % len(SCALE)], 5)
        for k, rate in enumerate(rates)
    ]
    for auto in autos:
        automatic = here & (columns["optimizer"] == auto)
        if automatic.any():
            points.append(_points(results, automatic & finite, label(auto), AUTO if auto in DEFAULT else BEST, 9))
            searched = searched | automatic
    figure = framed(points, "train error", {"title": {"text": "test error"}})
    figure["layout"]["legend"] |= {"title": {"text": "rate"}, "y": -0.24, "font": {"size": 11}}
    for axis, values in (("xaxis", "x"), ("yaxis", "y")):
        low = min((value for trace in points for value in trace[values]), default=0.01)
        span = [math.log10(low) - 0.08, 0.03]
        every = TICKS if span[0] > -2.2 else [10.0**d for d in range(-5, 1)]
        figure["layout"][axis] |= {"type": "log", "range": span} | tick_labels(every, [f"{100 * t:g} %" for t in every])
    return figure, int((~finite & searched).sum())


def _points(results: Results, rows: np.ndarray, name: str, colour: str, size: int) -> Figure:
    columns, jobs = results.columns, results.jobs
    x, y = columns["train_error"][rows], columns["test_error"][rows, -1]
    about = [
        ", ".join([*(f"{key} {number(value)}" for key, value in jobs[row].options), f"seed {jobs[row].seed}"])
        + f"<br>train {percent(float(a))}, test {percent(float(b))}"
        for row, a, b in zip(np.flatnonzero(rows), x, y, strict=True)
    ]
    outline = {"width": 1, "color": "#1d1f23"} if size > 5 else {"width": 0}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [round(float(value), 6) for value in np.maximum(x, FLOOR)],
        "y": [round(float(value), 6) for value in np.maximum(y, FLOOR)],
        "text": about,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "size": size, "opacity": 0.95 if size > 5 else 0.65, "line": outline},
    }
