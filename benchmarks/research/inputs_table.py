"""The runs of on_cpu.py with scaled inputs beside those of the same seeds with plain ones (docs/research.md).

    python benchmarks/research/inputs_table.py --plain docs/results/paper.tar docs/results/cells_18.jsonl

Of each cell the mean over its seeds, what was lost, by pairs of seeds, with its standard error, and the scatter between
all seeds of the plain runs: the seed noise. Rows with a `variant` count if it is that of --variant.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.pack import unpack
from autoopt_lab.record import Folder

MEASURES = {"average": "average_test_error", "test": "test_error"}  # the name in a row -> in the packed runs
Errors = dict[str, dict[int, dict[str, float]]]
"""TASK/OPTIMIZER/N -> seed -> measure -> per cent."""


def plain_runs(packed: Path, wanted: set[str]) -> Errors:
    """Those of the paper's experiment."""
    found: Errors = defaultdict(dict)
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(Path(place) / "paper")
        unpack(packed, folder)
        for part in folder.parts()[0]:
            for row, job in enumerate(part.jobs()):
                cell = f"{job.task}/{job.optimizer}/{job.batch}"
                if cell in wanted:
                    last = {name: float(np.ravel(part.columns[column][row])[-1]) for name, column in MEASURES.items()}
                    found[cell][job.seed] = {name: 100 * error for name, error in last.items()}
    return found


def scaled_runs(files: list[Path], variant: str) -> Errors:
    """Those of on_cpu.py; of two with the same seed the last one counts."""
    found: Errors = defaultdict(dict)
    for record in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        if record["inputs"] != 1 and record.get("variant", variant) == variant:
            found[record["cell"]][record["seed"]] = {name: 100 * record[name] for name in MEASURES}
    return found


def main() -> None:
    """One row for each cell and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--variant", default="S = 0.5")
    options = parser.parse_args()
    scaled = scaled_runs(options.files, options.variant)
    plain = plain_runs(options.plain, set(scaled))
    print("| cell | weights | plain | scaled | lost | seed noise | seeds |\n|---|---|---|---|---|---|---|")
    for cell, runs in scaled.items():
        seeds = sorted(set(runs) & set(plain[cell]))
        for name in MEASURES:
            pairs = [(plain[cell][seed][name], runs[seed][name]) for seed in seeds]
            before, after = map(statistics.mean, zip(*pairs, strict=True))
            lost = statistics.stdev(b - a for a, b in pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
            noise = statistics.stdev(errors[name] for errors in plain[cell].values())
            weights = "averaged" if name == "average" else "last"
            print(
                f"| {cell} | {weights} | {before:.2f} | {after:.2f} | {after - before:+.2f} ± {lost:.2f} "
                f"| {noise:.2f} | {len(seeds)} |"
            )


if __name__ == "__main__":
    main()
