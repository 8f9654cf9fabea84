"""Figures as plotly specifications: plain dicts, which the page's script draws in the colours of its theme."""

import math
from collections.abc import Iterable
from typing import Any

from autoopt_lab.demo import Row, percent
from autoopt_lab.names import label
from autoopt_lab.train import Run, Setting, Trace

Figure = dict[str, Any]

# Mid-tones, readable on the light and on the dark page alike.
AUTO, BEST, OTHER = "#e8590c", "#3b82c4", "rgba(128,128,128,0.5)"
LAYERS = ("#3b82c4", "#e8590c", "#2f9e63", "#a85cc9", "#b8860b", "#d6457a")


def errors(row: Row, runs: list[Run], floor: float) -> Figure:
    """Test error against the epoch, mean over the seeds: the grid faint, its best dashed, Auto bold, thin where its
    weights are not averaged.

    The axis is logarithmic, so errors below `floor` are drawn at it.
    """
    others = [result.setting for result in row.grid if result is not row.best]
    lines = [_curve(setting, runs, floor, "other rates", {"color": OTHER, "width": 1}) for setting in others]
    for line in lines[1:]:
        line["showlegend"] = False
    best, auto = row.best.setting, row.auto.setting
    lines.append(_curve(best, runs, floor, f"best rate: {best.lr:.2g}", {"color": BEST, "width": 2, "dash": "dash"}))
    name = label(auto.optimizer)
    lines.append(_curve(auto, runs, floor, f"{name}, last weights", {"color": AUTO, "width": 1}, averaged=False))
    lines.append(_curve(auto, runs, floor, name, {"color": AUTO, "width": 4}))
    ticks = [tick for tick in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if tick >= floor]
    labels = [f"{100 * tick:g} %" for tick in ticks]
    return framed(lines, "epoch", {"title": {"text": "test error"}, "type": "log"} | tick_labels(ticks, labels))


def rates(traces: dict[str, Trace]) -> Figure:
    """The learning rate that was chosen for every tensor, against the step."""
    lines = _per_tensor({name: (trace.step, trace.lr) for name, trace in traces.items()})
    return framed(lines, "step", {"title": {"text": "learning rate"}, "type": "log", "exponentformat": "power"})


def momenta(traces: dict[str, Trace]) -> Figure:
    """The momentum that was chosen for every tensor, against the step."""
    lines = _per_tensor({name: (trace.step, trace.momentum) for name, trace in traces.items()})
    highest = max((value for line in lines for value in line["y"] if value is not None), default=0.0)
    top = max(0.1, 1.05 * highest)  # not less: momenta that stay near zero should look like it
    return framed(lines, "step", {"title": {"text": "momentum"}, "range": [-0.02 * top, top]})


def _curve(
    setting: Setting, runs: list[Run], floor: float, name: str, line: dict[str, Any], averaged: bool = True
) -> Figure:
    seeds = [run.advised_errors if averaged else run.test_errors for run in runs if run.setting == setting]
    means = [sum(epoch) / len(epoch) for epoch in zip(*seeds, strict=True)]
    about = name if setting.lr is None else f"{label(setting.optimizer)}, rate {setting.lr:.2g}"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(range(len(means))),
        "y": drawable(max(mean, floor) if math.isfinite(mean) else mean for mean in means),
        "customdata": [percent(mean) for mean in means],
        "hovertemplate": f"{about}<br>epoch %{{x}}: %{{customdata}}<extra></extra>",
        "line": line,
    }


def _per_tensor(series: dict[str, tuple[list[int], list[float]]]) -> list[Figure]:
    """One colour per layer; weights solid, all else (biases) dotted."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in series))
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": steps,
            "y": drawable(values),
            "hovertemplate": f"{name}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
            "line": {
                "color": LAYERS[layers.index(name.rpartition(".")[0]) % len(LAYERS)],
                "width": 1.5,
                "dash": "solid" if name.endswith("weight") else "dot",
            },
        }
        for name, (steps, values) in series.items()
    ]


def drawable(values: Iterable[float]) -> list[float | None]:
    """JSON knows no NaN: None leaves a gap in the line."""
    return [value if math.isfinite(value) else None for value in values]


def tick_labels(values: list[float], labels: list[str]) -> dict[str, Any]:
    return {"tickmode": "array", "tickvals": values, "ticktext": labels}


def error_ticks(values: Iterable[float | None]) -> dict[str, Any]:
    """Labels in percent for a logarithmic axis over `values`: the roundest numbers of which it shows three or more."""
    known = [value for value in values if value] or [0.01, 1.0]
    low, high = 0.97 * min(known), 1.03 * max(known)
    ticks: list[float] = []
    for mantissas in ([1.0, 2.0, 5.0], *([k / parts for k in range(parts, 10 * parts)] for parts in (1, 2, 10, 50))):
        every = (mantissa * 10.0**d for d in range(math.floor(math.log10(low)), 1) for mantissa in mantissas)
        ticks = [tick for tick in every if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return tick_labels(ticks, [f"{100 * tick:.4g} %" for tick in ticks])


def framed(lines: list[Figure], across: str, up: dict[str, Any]) -> Figure:
    short = across == "epoch" and all(len(line["x"]) <= 12 for line in lines)  # or plotly labels fractions of one
    layout = {
        "xaxis": {"title": {"text": across}} | ({"dtick": 1} if short else {}),
        "yaxis": up,
        "margin": {"l": 64, "r": 12, "t": 8, "b": 44},
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
        "hovermode": "closest",
    }
    return {"data": lines, "layout": layout}
