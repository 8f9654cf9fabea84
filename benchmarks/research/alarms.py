"""Research: in which of the stored runs of the paper's experiment n, the steps since the data changed, was halved.

    python benchmarks/research/alarms.py [docs/results/paper.tar]

n is read off the momentum that the trace holds, β = 0.85 + 0.05 n/t. A run in which it was never halved after the
hundredth step, from which on the second test for shifts speaks, is the same with a second test that is harder to pass
(docs/research.md, "Which of the 360 runs the new test can have changed"). Nothing shifts in these runs.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.pack import unpack
from autoopt_lab.record import Folder

LIGHT, MOMENTUM, USUAL = 0.85, 0.9, 100  # as in autoopt.oracle.relative
LATE = 1000  # steps; what comes before is the way from the start


def halvings(steps: np.ndarray, beta: np.ndarray) -> list[int]:
    """The last stored step before each time that n fell behind t, after the first USUAL steps; (points,) each."""
    n = (beta - LIGHT) / (MOMENTUM - LIGHT) * (steps + 1) - 1  # the trace has β of the step to come
    slack = 2 + 0.01 * steps  # stored values are rounded; a halving is far more
    first = int(np.argmax(steps > USUAL))
    found = [0] if n[first] < steps[first] - USUAL - slack[first] else []
    grown, passed = np.diff(n)[first:], np.diff(steps)[first:]
    return found + [int(steps[first + i]) for i in np.nonzero(grown < passed - slack[first + 1 :])[0]]


def main() -> None:
    """Print, for each cell, the runs with an alarm on the way from the start, and those with one later."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tar", type=Path, nargs="?", default=Path("docs/results/paper.tar"))
    cells: dict[tuple[str, str, int], list[tuple[int, list[int]]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        unpack(parser.parse_args().tar, Folder(Path(place)))
        for file in Path(place).rglob("*-auto-*.npz"):
            part = np.load(file)
            beta = np.median(part["trace.value"][:, :, 1].astype(float), 2)  # one for all tensors
            names = zip(*(part[f"column.{name}"].tolist() for name in ("task", "optimizer", "batch")), strict=True)
            for cell, seed, row in zip(names, part["column.seed"].tolist(), beta, strict=True):
                cells[cell].append((seed, halvings(part["trace.step"].astype(float), row)))
    untouched = 0
    for cell, runs in sorted(cells.items()):
        late = sorted(seed for seed, found in runs if any(step > LATE for step in found))
        early = sorted(seed for seed, found in runs if found and seed not in late)
        untouched += len(runs) - len(late) - len(early)
        print(*cell, f"early {early}, late {late}")
    print(f"{untouched} of {sum(map(len, cells.values()))} runs without any")


if __name__ == "__main__":
    main()
