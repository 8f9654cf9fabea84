"""Draws the figures of docs/method.md: simulated ones with autoopt.oracle, and one from docs/results.

    python docs/figures/draw.py          # writes the SVG files beside this script

Plain SVG on a light card of its own, so that it reads on light and on dark pages alike. Seeded.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autoopt import oracle

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 320, 62, 18, 46, 46
INK, PALE, COLOURS = "#24292f", "#d5d9df", ("#1f6feb", "#d1495b", "#2a9d5c")
DIMENSIONS, SAMPLES, STEPS, SHIFT, SMOOTHING = 400, 32, 120, 60, 0.9


# The simulation.


@dataclass
class Step:
    """What is true and what is estimated at one step."""

    true_rate: float
    rate: float  # smoothed, the one that is used
    true_noise: float
    noise: float  # of this mini-batch alone


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def estimated(contributions: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:
    """γ̂ and V̂/<g,g> from c_i, (..., samples, dimensions), and m, with the metric 1."""
    gradient = contributions.sum(-2)
    gg, gm, mm = (gradient * gradient).sum(-1), (gradient * estimate).sum(-1), (estimate * estimate).sum(-1)
    variance = oracle.variance(contributions.square().sum((-2, -1)), gg, torch.tensor(SAMPLES))
    return torch.stack(oracle.solve(variance, gg, gm, mm), -1), variance / gg


def descent(curvature: float) -> list[Step]:
    """Descend curvature/2 · |w - w*|² without momentum; w* jumps at SHIFT. The metric is 1 whatever the curvature is.

    Without momentum eq. oracle is one number: α = 1 - b1/A11 = |ḡ|² / (curvature · (|ḡ|² + V)).
    """
    generator = torch.Generator().manual_seed(1)
    nothing = torch.zeros(DIMENSIONS, dtype=torch.float64)
    weights, best = normal(generator, DIMENSIONS), nothing
    gamma = torch.tensor([0.999, 0.0], dtype=torch.float64)
    steps = []
    for step in range(STEPS):
        if step == SHIFT:
            best = normal(generator, DIMENSIONS)
        true = curvature * (weights - best)
        contributions = (true + curvature * normal(generator, SAMPLES, DIMENSIONS)) / SAMPLES  # c_i
        solved, noise = estimated(contributions, nothing)
        gamma = oracle.smooth(gamma, solved, SMOOTHING)
        size, variance = true @ true, curvature**2 * DIMENSIONS / SAMPLES
        share = float(variance / (variance + size))
        steps.append(Step((1 - share) / curvature, float(1 - gamma[0]), share, float(noise)))
        weights = weights - (1 - gamma[0]) * contributions.sum(0)
    return steps


def oracles(batches: int = 200) -> list[tuple[float, float, float, float, float]]:
    """(share of noise, true rate, mean estimated rate, true momentum, mean estimated momentum), metric = Hessian = 1.

    m is an average of earlier gradients: the true one and a quarter of a mini-batch's variance.
    """
    generator = torch.Generator().manual_seed(2)
    ones = torch.ones(DIMENSIONS, dtype=torch.float64)
    direction, error = normal(generator, DIMENSIONS), normal(generator, DIMENSIONS)
    rows = []
    for share in (n / 20 for n in range(1, 20)):
        true = direction / direction.norm() * math.sqrt((1 - share) / share * DIMENSIONS / SAMPLES)
        estimate = true + error * math.sqrt(0.25 / SAMPLES)
        truth = oracle.true_oracle(true, torch.diag(ones), ones, torch.diag(ones) / SAMPLES, estimate)
        contributions = (true + normal(generator, batches, SAMPLES, DIMENSIONS)) / SAMPLES
        gamma = estimated(contributions, estimate)[0].mean(0)
        pairs = ((float(1 - g[0]), float(g[1] / (1 - g[0]))) for g in (truth, gamma))
        (rate, momentum), (our_rate, our_momentum) = pairs
        rows.append((share, rate, our_rate, momentum, our_momentum))
    return rows


def smoothing_errors(task: str) -> dict[str, list[tuple[float, float]]]:
    """(-log10(1 - υ), test error in %) of each automatic optimizer, mean over the seeds of docs/results."""
    records = json.loads((HERE.parent / "results" / "reproduction.json").read_text())["records"]
    found: dict[str, dict[float, list[float]]] = {}
    for record in records:
        options = record["options"]
        if record["task"] == task and "smoothing" in options and options.get("eps") != 1e-3:
            errors = found.setdefault(record["optimizer"], {}).setdefault(options["smoothing"], [])
            errors.append(100 * record["test"])
    return {
        name: [(-math.log10(1 - value), statistics.mean(errors)) for value, errors in sorted(by.items())]
        for name, by in found.items()
    }


# The drawing.


@dataclass
class Axis:
    """A linear scale from data to points on the page."""

    title: str
    ticks: dict[float, str]
    low: float
    high: float

    def place(self, value: float, start: float, end: float) -> float:
        return start + (min(max(value, self.low), self.high) - self.low) / (self.high - self.low) * (end - start)


def chart(title: str, x: Axis, y: Axis, lines: dict[str, list[tuple[float, float]]]) -> str:
    """One chart as SVG text; the first line is thick, later ones lie over it."""

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return x.place(point[0], LEFT, WIDTH - RIGHT), y.place(point[1], HEIGHT - BOTTOM, TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fbfcfd"/>',
    ]
    for value, label in y.ticks.items():
        level = at((x.low, value))[1]
        parts.append(f'<path d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}" stroke="{PALE}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in x.ticks.items():
        place = at((value, y.low))[0]
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x.title}</text>')
    parts.append(f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y.title}</text>')
    place = float(LEFT)
    for number, ((name, points), colour) in enumerate(zip(lines.items(), COLOURS, strict=False)):
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in map(at, points))
        thick = 5 if number == 0 and len(lines) == 2 else 1.8
        faint = ' stroke-opacity="0.45"' if thick == 5 else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{thick}"{faint}/>')
        parts.append(f'<path d="M{place} 24h22" stroke="{colour}" stroke-width="{thick}"{faint}/>')
        parts.append(f'<text x="{place + 28}" y="28">{name}</text>')
        place += 60 + 6.6 * len(name)
    return "\n".join([*parts, "</svg>", ""])


QUARTERS = {n / 4: f"{n / 4:g}" for n in range(5)}


def over_steps(title: str, label: str, truth: list[float], ours: list[float], names: tuple[str, str]) -> str:
    x = Axis("step", {float(n): str(n) for n in range(0, STEPS + 1, 20)}, 0, STEPS)
    y = Axis(label, QUARTERS, 0, 1.15)
    return chart(title, x, y, {names[0]: list(enumerate(truth, 1)), names[1]: list(enumerate(ours, 1))})


def simulated() -> dict[str, str]:
    """The figures that need nothing but the oracle."""
    known, steep, table = descent(1.0), descent(1.6), oracles()
    best = ("the best rate", f"estimated from the batches, υ = {SMOOTHING}")
    shares = ("true: V / (V + |ḡ|²)", f"measured: V̂ / |g|² of one batch of {SAMPLES}")
    both = ("the true oracle", "estimated, mean over 200 batches")
    x = Axis("share of noise in the gradient", QUARTERS, 0, 1)
    charts = {
        "noise.svg": over_steps(
            "The share of noise in the gradient", "share of noise",
            [s.true_noise for s in known], [s.noise for s in known], shares,
        ),
        "rate.svg": over_steps(
            "The chosen rate beside the best", "rate α", [s.true_rate for s in known], [s.rate for s in known], best
        ),
        "rate-steep.svg": over_steps(
            "The same where the curvature is not what the metric says", "rate α",
            [s.true_rate for s in steep], [s.rate for s in steep], best,
        ),
    }  # fmt: skip
    for file, label, at in (("oracle-rate.svg", "rate α", 1), ("oracle-momentum.svg", "momentum β", 3)):
        lines = {name: [(row[0], row[at + i]) for row in table] for i, name in enumerate(both)}
        charts[file] = chart(f"{label} of the oracle and of its estimate", x, Axis(label, QUARTERS, 0, 1.05), lines)
    return charts


def measured() -> dict[str, str]:
    """The figure that is made from docs/results."""
    names = {"paper-sgd": "AutoSGD", "paper-adam": "AutoAdam", "paper-adagrad": "AutoAdaGrad"}
    errors = smoothing_errors("cifar10")
    x = Axis("smoothing υ", {1.0: "0.9", 2.0: "0.99", 3.0: "0.999", 4.0: "0.9999", 5.0: "0.99999"}, 0.9, 5.4)
    y = Axis("test error, %", {float(n): str(n) for n in range(30, 101, 10)}, 30, 100)
    lines = {names[name]: errors[name] for name in names}
    return {"smoothing.svg": chart("Test error on CIFAR-10 against the smoothing", x, y, lines)}


if __name__ == "__main__":
    for file, text in (simulated() | measured()).items():
        (HERE / file).write_text(text, encoding="utf-8")
