"""Makes the figures and tables of docs/paper.md from the stored runs of the paper's experiment.

    python docs/figures/paper.py [TAR]          # docs/results/paper.tar by default

Writes the SVG files beside this script, and in docs/paper.md what is between each pair of markers. The figures are
those of the laboratory's page (`autoopt paper --tables`), drawn as plain SVG on a light card of its own.
"""

import argparse
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from draw import INK, PALE

from autoopt_lab.names import COUNTERPARTS, DEFAULT, label
from autoopt_lab.pack import unpack
from autoopt_lab.paper import BATCHES, PLAIN
from autoopt_lab.record import Folder
from autoopt_lab.report.figures import AUTO, BEST, Figure
from autoopt_lab.report.paper_figures import chosen, scatter
from autoopt_lab.report.paper_page import FIGURE3_BATCHES
from autoopt_lab.results import Results, load
from autoopt_lab.table2 import FIXED_BATCH, TASKS, Cell, Row, Spread, best, cells, number, spread, subject, table2

HERE = Path(__file__).parent
PAGE, RUNS = HERE.parent / "paper.md", HERE.parent / "results" / "paper.tar"
WIDTH, COLUMN, LEFT, RIGHT, FONT = 560, 272, 54, 18, 14  # large type: a phone shows it at 60 %
BAND, BELOW, GAP = 20, 28, 14  # a panel's title, the labels of its axis, and what is under them
TICKS = [0.01, 0.02, 0.03, 0.05, 0.2, 0.3, 0.4, 0.5, 0.6]
SHOWN = {"mnist": ((0.008, 0.05), (0.008, 0.05)), "cifar10": ((0.15, 0.65), (0.3, 0.65))}  # train and test error
AUTOS = {plain: [auto for auto in COUNTERPARTS if COUNTERPARTS[auto] == plain] for plain in PLAIN}  # default rule first


def read(tar: Path) -> Results:
    with tempfile.TemporaryDirectory() as place:
        unpack(tar, Folder(Path(place)))
        return load(Path(place))[0]


# The figures.


@dataclass
class Axis:
    """A scale from data to points on the page, with labelled ticks."""

    low: float
    high: float
    ticks: dict[float, str]
    logarithmic: bool

    def place(self, value: float, start: float, end: float) -> float:
        low, high, at = (math.log10(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return start + (at - low) / (high - low) * (end - start)


@dataclass
class Panel:
    title: str
    x: Axis
    y: Axis
    marks: str  # inside the panel, at its own coordinates

    def drawn(self, left: float, top: float, height: float) -> str:
        """The panel's frame, ticks and marks; labels that would touch the one before are left out."""
        width = COLUMN - LEFT - RIGHT
        parts = [f'<g transform="translate({left + LEFT:g} {top + BAND:g})">', f'<text y="-7">{self.title}</text>']
        free = math.inf
        for value, text in sorted(self.y.ticks.items()):
            level = self.y.place(value, height, 0)
            parts.append(f'<path d="M0 {level:.1f}H{width}" stroke="{PALE}"/>')
            if level < free:
                parts.append(f'<text x="-6" y="{level + 5:.1f}" text-anchor="end">{text}</text>')
                free = level - 1.3 * FONT
        free = -math.inf
        for value, text in sorted(self.x.ticks.items()):
            place, half = self.x.place(value, 0, width), 0.29 * FONT * len(text)
            parts.append(f'<path d="M{place:.1f} 0V{height}" stroke="{PALE}"/>')
            if place - half > free:
                parts.append(f'<text x="{place:.1f}" y="{height + 18}" text-anchor="middle">{text}</text>')
                free = place + half + 6
        return "\n".join([*parts, self.marks, "</g>"])


def sheet(title: str, panels: list[Panel], height: int, legend: list[tuple[str, str]], axes: tuple[str, str]) -> str:
    """Panels in two columns and one legend, above or in the place of a last panel: (mark around (0, 0), name) each."""
    row, aside = BAND + height + BELOW + GAP, len(panels) % 2 == 1
    below = len(panels) // 2 * row + 30.0
    entries, across, down = [], COLUMN + 70.0 if aside else 12.0, below if aside else 24.0
    for mark, name in legend:
        room = 34 + 0.56 * FONT * len(name)
        if not aside and across + room > WIDTH:
            across, down = 12.0, down + 22
        entries.append(f'<g transform="translate({across + 8:g} {down:g})">{mark}<text x="12" y="5">{name}</text></g>')
        across, down = (across, down + 20) if aside else (across + room, down)
    top = 14 if aside else down + 22
    whole = math.ceil(top + math.ceil(len(panels) / 2) * row + 12)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="640" viewBox="0 0 {WIDTH} {whole}" role="img" '
            f'aria-label="{title}" font-family="sans-serif" font-size="{FONT}" fill="{INK}">',
            f'<rect width="{WIDTH}" height="{whole}" rx="8" fill="#fbfcfd"/>',
            *entries,
            *(p.drawn(16 + n % 2 * COLUMN, top + n // 2 * row, height) for n, p in enumerate(panels)),
            f'<text x="{WIDTH / 2}" y="{whole - 10}" text-anchor="middle">{axes[0]}</text>',
            f'<text transform="translate(16 {(top + whole) / 2:g}) rotate(-90)" text-anchor="middle">{axes[1]}</text>',
            "</svg>",
            "",
        ]
    )


def dots(points: list[tuple[float, float]], trace: Figure, size: float = 4.5) -> str:
    """One path: a dot is a line without length and with round ends. Automatic runs are large, with an edge."""
    path = "".join(f"M{x:.1f} {y:.1f}h.1" for x, y in points)
    colour = trace["marker"]["color"]
    if colour not in (AUTO, BEST):
        return f'<path d="{path}" stroke="{colour}" stroke-width="{size}" stroke-linecap="round" stroke-opacity=".7"/>'
    colour, edge = (AUTO, INK) if colour == AUTO else (INK, "#fff")  # the paper's own rule in black, as in the paper
    return (
        f'<g stroke-linecap="round"><path d="{path}" stroke="{edge}" stroke-width="8"/>'
        f'<path d="{path}" stroke="{colour}" stroke-width="5.5"/></g>'
    )


def curve(points: list[tuple[float, float]], trace: Figure) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{trace["line"]["color"]}" stroke-width="1.8"/>'


def panel(
    title: str, figure: Figure, x: Axis, y: Axis, height: int, draw: Callable[[list[tuple[float, float]], Figure], str]
) -> Panel:
    def placed(trace: Figure) -> list[tuple[float, float]]:
        pairs = zip(trace["x"], trace["y"], strict=True)
        width = COLUMN - LEFT - RIGHT
        return [
            (x.place(a, 0, width), y.place(b, height, 0))
            for a, b in pairs
            if b is not None and x.low <= a <= x.high and b <= y.high
        ]

    marks = [draw(points, trace) for trace in figure["data"] if (points := placed(trace))]
    return Panel(title, x, y, "\n".join(marks))


def scattered(results: Results, where: list[tuple[str, str, int]], title: str) -> tuple[str, str]:
    """Test against train error, a panel for each task, optimizer and N; and a sentence on what is not in sight."""
    panels, hidden, names = [], [], dict[str, Figure]()
    for task, plain, batch in where:
        figure, lost = scatter(results, task, plain, AUTOS[plain], batch)
        name = f"{subject(task)}, {label(plain)}, N = {batch}"
        x, y = (Axis(lo, hi, {t: f"{100 * t:g}%" for t in TICKS if lo <= t <= hi}, True) for lo, hi in SHOWN[task])
        panels.append(panel(name, figure, x, y, 200, dots))
        every = [(a, b) for trace in figure["data"] for a, b in zip(trace["x"], trace["y"], strict=True)]
        outside = sum(not (x.low <= a <= x.high and y.low <= b <= y.high) for a, b in every)
        hidden.append(f"{name}: {outside} and {lost} of {len(every) + lost}")
        for trace in figure["data"]:
            rules = {AUTO: "automatic, default rule", BEST: "automatic, Algorithm 1"}
            names.setdefault(rules.get(trace["marker"]["color"], f"rate {trace['name']}"), trace)
    legend = [(dots([(0, 0)], trace, 6.5), name) for name, trace in sorted(names.items(), key=lambda n: n[0][0] != "a")]
    sentence = f"Runs outside the panel, and runs that diverged: {'; '.join(hidden)}."
    return sheet(title, panels, 200, legend, ("train error", "test error")), sentence


def over_steps(results: Results) -> str:
    """Figure 2 from the second stored step on: at the first, every curve is where it starts."""
    panels, legend = [], list[tuple[str, str]]()
    for auto, rule in (("paper-sgd", "Algorithm 1"), ("auto-sgd", "Default rule")):
        for kind in ("rate", "momentum"):
            figure = chosen(results, "mnist", auto, kind)
            steps = [step for trace in figure["data"] for step in trace["x"]] or [1, 100]
            highest = max((v for trace in figure["data"] for v in trace["y"] if v is not None), default=1.0)
            apart = next(d for d in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if highest / d < 6)
            ticks = {n * apart: f"{n * apart:g}" for n in range(math.floor(1.08 * highest / apart) + 1)}
            x = Axis(20, max(steps) * 1.1, {100.0: "100", 1e3: "1,000", 1e4: "10,000"}, True)
            panels.append(panel(f"{rule}: {kind}", figure, x, Axis(0, 1.08 * highest, ticks, False), 180, curve))
            legend = legend or [(curve([(-8, 0), (8, 0)], trace), trace["name"]) for trace in figure["data"]]
    title = "Rate and momentum of the first convolution against the step, by mini-batch size"
    return sheet(title, panels, 180, legend, ("step", ""))


def figures(results: Results) -> tuple[dict[str, str], dict[str, str]]:
    """The SVG text of each file, and what figures 3 and 4 do not show."""
    three = [("mnist", "sgd", batch) for batch in FIGURE3_BATCHES]
    four = [(task, plain, FIXED_BATCH) for plain in PLAIN for task in TASKS]
    charts, hidden = {"paper-figure2.svg": over_steps(results)}, dict[str, str]()
    for count, where in ((3, three), (4, four)):
        title = f"Test against train error of every run, {len(where)} panels"
        charts[f"paper-figure{count}.svg"], hidden[f"figure {count}"] = scattered(results, where, title)
    return charts, hidden


# The tables.


@dataclass
class Place:
    """One of the 36 cells; what was not run is None."""

    task: str
    plain: str
    batch: int
    grid: Cell | None
    default: Cell | None
    paper: Cell | None

    @property
    def name(self) -> str:
        return f"{subject(self.task)}, {label(self.plain)}, N = {self.batch}"

    @property
    def searched(self) -> Spread | None:
        return self.grid.test if self.grid else None

    @property
    def averaged(self) -> Spread | None:
        return self.default.averaged if self.default else None

    @property
    def last(self) -> Spread | None:
        return self.default.test if self.default else None

    @property
    def algorithm(self) -> Spread | None:
        return self.paper.test if self.paper else None

    def met(self, errors: Spread | None) -> bool:
        """Whether the grid's best is not below."""
        return (
            errors is not None and self.grid is not None and errors.mean <= self.grid.test.mean
        )  # a diverged seed: NaN


def places(results: Results) -> list[Place]:
    """The grid's best is of all settings at that N, whatever their number of seeds."""
    groups = dict[tuple[str, str, int], list[Cell]]()
    for cell in cells(results):
        groups.setdefault((cell.task, cell.optimizer, cell.batch), []).append(cell)

    def at(task: str, optimizer: str, batch: int) -> Cell | None:
        found = groups.get((task, optimizer, batch))
        return best(found) if found else None

    return [
        Place(task, plain, batch, *(at(task, name, batch) for name in (plain, *AUTOS[plain])))
        for task in TASKS
        for plain in PLAIN
        for batch in BATCHES
    ]


def bare(errors: Spread | None) -> str:
    """In %, without the sign."""
    return spread(errors).removesuffix("\N{NO-BREAK SPACE}%") if errors else ""


def whole(config: str) -> str:
    """Broken into lines between the settings alone."""
    return ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in config.split(", "))


def rows(head: str, lines: list[list[str]]) -> str:
    table = [head, "|---" * (head.count("|") - 1) + "|", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(line.replace("  ", " ") for line in table)


def by_task(table: Callable[[str], str]) -> str:
    return "\n\n".join(f"**{name}**\n\n{table(task)}" for task, name in TASKS.items())


def lowest(found: list[Row], task: str) -> str:
    lines = []
    for row in found:
        if row.task == task:
            paper, averaged = row.published, row.ours.averaged if row.optimizer in DEFAULT else None
            test = f"{bare(averaged)} (last {bare(row.ours.test)})" if averaged else bare(row.ours.test)
            theirs = [bare(paper.test), bare(paper.train)] if paper else ["", ""]
            errors = [test, theirs[0], bare(row.ours.train), theirs[1]]
            lines.append([row.label, str(row.searched), *errors, whole(row.ours.config)])
    table = rows("| optimizer | settings | test error | the paper's | train error | the paper's | setting |", lines)
    configs = [
        f"{row.label} {row.published.config}"
        for row in found
        if row.published and row.task == task and row.optimizer in PLAIN
    ]
    return f"{table}\n\nThe paper's settings: {'; '.join(configs)}."


def every_cell(found: list[Place], task: str) -> str:
    lines = []
    for place in found:
        if place.task == task:
            errors = [place.averaged, place.last, place.algorithm]
            seeds = {str(cell.seeds): None for cell in (place.grid, place.default, place.paper) if cell}
            grid = (
                [bare(place.grid.test), whole(place.grid.config.partition(", ")[2])] if place.grid else ["not run", ""]
            )
            marked = [f"**{bare(error)}**" if place.met(error) else bare(error) for error in errors]
            lines.append([label(place.plain), str(place.batch), *grid, *marked, ", ".join(seeds)])
    head = "| optimizer | N | best of the grid | its setting | default, averaged | last | Algorithm 1 | seeds |"
    return rows(head, lines)


def verdict(found: list[Place]) -> str:
    """How often each is at or below the grid, and where the default rule is not."""
    full = [place for place in found if place.grid and place.default and place.paper]
    counts = [
        f"the default rule's averaged weights in {sum(p.met(p.averaged) for p in full)}",
        f"its last weights in {sum(p.met(p.last) for p in full)}",
        f"Algorithm 1 in {sum(p.met(p.algorithm) for p in full)}",
    ]
    by = Counter(place.plain for place in full if place.met(place.algorithm))
    share = ", ".join(f"{by[plain]} with {label(plain)}" for plain in PLAIN)
    lines = [f"Of {len(full)} cells, at or below the best of the grid: {', '.join(counts)} ({share}).", ""]
    beaten = [("the averaged weights", [p for p in full if not p.met(p.averaged)])]
    beaten.append(("the last weights alone", [p for p in full if p.met(p.averaged) and not p.met(p.last)]))
    for what, where in beaten:
        for place in where:
            errors = f"{bare(place.averaged)} averaged, {bare(place.last)} last"
            lines.append(f"- Above it, {what}: {place.name}: {errors}, the grid {bare(place.searched)}.")
    return "\n".join(lines)


def differences(found: list[Row]) -> str:
    """Where ours is further from the paper's figure than two of its standard deviations σ."""
    lines = [f"- {subject(row.task)}, {row.label} (N = {row.ours.batch}): {row.remark}" for row in found if row.remark]
    return "\n".join(lines) or "None."


def ramp(results: Results, found: list[Place]) -> str:
    """What Algorithm 1 with Adam chose for MNIST's first convolution at the end, beside the best rate of the grid."""
    lines = []
    for place in found:
        figure = chosen(results, "mnist", "paper-adam", "rate")
        ends = {trace["name"]: (trace["x"][-1], trace["y"][-1]) for trace in figure["data"]}
        name = f"N = {place.batch}"
        if (place.task, place.plain) == ("mnist", "adam") and place.grid and name in ends:
            step, rate = ends[name]
            lines.append([str(place.batch), f"{step:,}", f"{rate:.3f}", number(place.grid.options["lr"])])
    return rows("| N | step | rate by Algorithm 1 | best rate of the grid |", lines)


def said(results: Results) -> str:
    """How many runs there are, of how many, and by what they were made."""
    wanted, have = results.manifest.jobs(), set(results.jobs)
    missing = Counter(f"{subject(job.task)} at N = {job.batch}" for job in wanted if job not in have)
    lost = int((~np.isfinite(results.columns["test_error"][:, -1])).sum())
    about = [
        sorted({str(made[key])[:n] for made in results.made})
        for key, n in (("hardware", 99), ("torch", 99), ("commit", 7))
    ]
    hardware, torch, commits = (", ".join(values) for values in about)
    conditions = results.manifest.conditions
    lines = [
        f"{len(have):,} of {len(wanted):,} runs: {hardware}, torch {torch}, {conditions.precision} products, "
        f"{conditions.epochs} epochs, commits {commits}. {lost} runs ended without a finite error."
    ]
    if missing:
        lines.append(f"Missing: {', '.join(f'{count} of {name}' for name, count in missing.items())}.")
    return "\n".join(lines)


def parts(results: Results, hidden: dict[str, str]) -> dict[str, str]:
    """What belongs between the markers of the page."""
    found, cell = table2(results), places(results)
    return {
        "runs": said(results),
        "table 2": by_task(lambda task: lowest(found, task)),
        "differences": differences(found),
        "ramp": ramp(results, cell),
        "verdict": verdict(cell),
        "cells": by_task(lambda task: every_cell(cell, task)),
        **hidden,
    }


def filled(page: str, texts: dict[str, str]) -> str:
    for name, text in texts.items():
        begin, end = f"<!-- made by figures/paper.py: {name} -->\n", f"\n<!-- end: {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{PAGE.name} has no place for {name}: it needs {begin.strip()} and {end.strip()}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the figures and tables of docs/paper.md.")
    parser.add_argument("tar", type=Path, nargs="?", default=RUNS)
    results = read(parser.parse_args().tar)
    charts, hidden = figures(results)
    for file, text in charts.items():
        (HERE / file).write_text(text, encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), parts(results, hidden)), encoding="utf-8")


if __name__ == "__main__":
    main()
