"""The runs of cells.py beside the best cell of the paper's grid, as tables (docs/research.md).

    python benchmarks/research/cells_table.py --grid docs/results/paper.tar docs/results/cells_*.jsonl

A cell of the grid is the mean over its seeds of the last test error; of those that are finite, the lowest counts.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.pack import unpack
from autoopt_lab.record import Folder

KINDS = ("sgd", "adam", "adagrad")
Cell = tuple[str, str, int]  # task, metric, N


def best_of_grid(packed: Path) -> dict[Cell, tuple[float, float, int]]:
    """Mean, standard deviation and number of seeds."""
    errors: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(Path(place) / "paper")
        unpack(packed, folder)
        for part in folder.parts()[0]:
            for job, error in zip(part.jobs(), part.columns["test_error"], strict=True):
                errors[job.task, job.optimizer, job.batch, job.options].append(100 * float(error[-1]))
    found: dict[Cell, tuple[float, float, int]] = {}
    for (task, kind, batch, _), values in errors.items():
        mean, cell = statistics.mean(values), (task, kind, batch)
        if mean < found.get(cell, (1e9,))[0]:
            found[cell] = mean, statistics.stdev(values) if len(values) > 1 else 0.0, len(values)
    return found


def main() -> None:
    """One table of cells and one of shifts for each variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--grid", type=Path, required=True)
    options = parser.parse_args()
    grid = best_of_grid(options.grid)
    runs: dict[tuple[str, int | None], dict[Cell, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in (line for file in options.files for line in file.read_text().splitlines()):
        record = json.loads(line)
        cell = record["task"], record["kind"], record["batch"]
        same = runs[record["variant"], record["shift"]][cell]
        if all(record["seed"] != other["seed"] for other in same):  # the same run may be in two stages
            same.append(record)

    def mean(records: list[dict[str, Any]], part: str, epoch: int) -> str:
        return f"{100 * statistics.mean(r[part][epoch] for r in records):.2f}" if records else "-"

    tasks = ("cifar10", "mnist")
    print("best of the grid")
    for batch in (8, 16, 32, 64, 128, 256):
        cells = [[grid.get((task, kind, batch)) for kind in KINDS] for task in tasks]
        texts = [" / ".join("-" if c is None else f"{c[0]:.2f}" for c in row) for row in cells]
        print(f"| {batch} | {texts[0]} | {texts[1]} |")
    for (variant, shift), cells in runs.items():
        print(f"\n{variant}, last (averaged)" + (f", shift at epoch {shift}; one epoch after" if shift else ""))
        for batch in sorted({cell[2] for cell in cells}):
            row = []
            for task in tasks:
                found = [cells[task, kind, batch] for kind in KINDS]
                last, average = (" / ".join(mean(r, part, -1) for r in found) for part in ("test", "average"))
                after = " / ".join(mean(r, "average", shift) for r in found) if shift else ""
                row.append(f"{last} ({average})" + (f"; ({after})" if shift else ""))
            seeds = max(len(records) for records in cells.values())
            print(f"| {batch} | {row[0]} | {row[1]} | {seeds} seeds")


if __name__ == "__main__":
    main()
