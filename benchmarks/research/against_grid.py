"""Research: every automatic optimizer against torch's own with the best of eleven rates; also wider, and inputs x 0.1.

    python benchmarks/research/against_grid.py --out FILE [--seeds 5] [--only "inputs x 0.1"]     # CPU, one core

scikit-learn's digits, 400 steps of 64 samples, the CNN of invariance.py, trained by the library (docs/research.md). The
rates are 10^-4 to 10 in half decades, the rest is torch's default (momentum 0.9 for SGD and RMSprop). Test error in %,
mean over the seeds: of ours with the averaged and with the last weights, of the grid's the best and the median one.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from invariance import CHANGES, Change, cnn, test_error, train
from torch import nn, optim

import autoopt
from autoopt_lab.tasks import digits

TRIED = ("plain", "width x 4", "inputs x 0.1")
RATES = [10 ** (k / 2) for k in range(-8, 3)]
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "SGD": (autoopt.AutoSGD, functools.partial(optim.SGD, momentum=0.9)),
    "Adam": (autoopt.AutoAdam, optim.Adam),
    "AdaGrad": (autoopt.AutoAdaGrad, optim.Adagrad),
    "AdamW": (autoopt.AutoAdamW, optim.AdamW),
    "NAdam": (autoopt.AutoNAdam, optim.NAdam),
    "AMSGrad": (functools.partial(autoopt.AutoAdam, amsgrad=True), functools.partial(optim.Adam, amsgrad=True)),
    "RMSprop": (autoopt.AutoRMSprop, functools.partial(optim.RMSprop, momentum=0.9)),
    "AdaDelta": (autoopt.AutoAdaDelta, optim.Adadelta),
    "GaussNewton": (autoopt.AutoGaussNewton, None),
}


def run(change: Change, make: Callable[[nn.Module], Any], seed: int) -> list[float]:
    """The test error of the last weights, and of the averaged ones if there are any."""
    data = digits.data()
    test_inputs = change.inputs * data.test_inputs
    torch.manual_seed(seed)
    model = cnn(change.width)
    optimizer = make(model)
    train(model, optimizer, seed, change)
    errors = [test_error(model, test_inputs, data.test_targets)]
    if isinstance(optimizer, autoopt.AutoOptimizer):
        optimizer.detach()
        with optimizer.averaged():
            errors.append(test_error(model, test_inputs, data.test_targets))
    return errors


def mean(runs: list[list[float]], column: int) -> float:
    return round(statistics.fmean(run[column] for run in runs), 3)


def main() -> None:
    """Print one line per optimizer and width, write every seed's figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=CHANGES, help="one of the changes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for title in [arguments.only] if arguments.only else TRIED:
        change = CHANGES[title]
        for name in PAIRS if title == "plain" else ("SGD", "Adam", "AdaGrad"):
            ours, plain = PAIRS[name]
            seeds = range(arguments.seeds)
            found = [run(change, ours, seed) for seed in seeds]
            line = f"{title} Auto{name}: averaged {mean(found, 1)}, last {mean(found, 0)}"
            grid: dict[str, list[float]] = {}
            if plain is not None:
                for rate in RATES:
                    make = functools.partial(plain, lr=rate)
                    grid[f"{rate:.2g}"] = [
                        run(change, lambda model, make=make: make(model.parameters()), s)[0] for s in seeds
                    ]
                means = {rate: statistics.fmean(errors) for rate, errors in grid.items()}
                best = min(means, key=means.__getitem__)
                line += f"; grid: best {means[best]:.3g} at {best}, median {statistics.median(means.values()):.3g}"
            print(line, flush=True)
            records.append({"change": title, "name": name, "last, averaged": found, "grid": grid})
            arguments.out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
