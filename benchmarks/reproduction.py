"""The paper's table at N = 128, and the figures behind the default smoothing of `rule="paper"`.

    python3 benchmarks/reproduction.py --data DIR --out FILE [--seeds 5] [--epochs 10]      # needs a GPU
    python3 benchmarks/reproduction.py --table FILE                                         # prints the tables

Trains, with the laboratory's vectorised engine, the paper's two CNNs with every rate (and momentum, for SGD) of its
grid, and with Algorithm 1 for a range of υ. Errors are of the last weights, the mean over seeds.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from autoopt_lab.engine import Plan, Run, train
from autoopt_lab.tasks import cifar10, mnist

TASKS = {"mnist": mnist, "cifar10": cifar10}
RATES = [10 ** (-k / 2) for k in range(9)]
MOMENTA = [0.0, 0.3, 0.8, 0.9, 0.95, 0.99]
SMOOTHING = [0.9, 0.99, 0.999, 0.9995, 0.9999, 0.99995, 0.99999, 0.999995]
SETTINGS: dict[str, list[dict[str, float]]] = {
    "sgd": [{"lr": lr, "momentum": momentum} for lr in RATES for momentum in MOMENTA],
    "adam": [{"lr": lr} for lr in RATES],
    "adagrad": [{"lr": lr} for lr in RATES],
    "paper-sgd": [{"smoothing": u} for u in SMOOTHING],
    "paper-adam": [{"smoothing": u, "eps": eps} for u in SMOOTHING for eps in (1e-8, 1e-3)],
    "paper-adagrad": [{"smoothing": u} for u in SMOOTHING],
}
PAPER = {  # test error and standard deviation, Table 2
    "mnist": {"sgd": (1.21, 0.11), "paper-sgd": (1.22, 0.16), "adam": (1.14, 0.04), "paper-adam": (1.35, 0.12),
              "adagrad": (1.86, 0.18), "paper-adagrad": (1.23, 0.12)},
    "cifar10": {"sgd": (36.4, 0.85), "paper-sgd": (38.7, 1.56), "adam": (36.4, 1.03), "paper-adam": (47.8, 2.69),
                "adagrad": (38.3, 1.31), "paper-adagrad": (36.7, 0.82)},
}  # fmt: skip


def run(data: Path, out: Path, seeds: int, epochs: int) -> None:
    """Train everything that the file does not hold yet, and write one record per run."""
    records: list[dict[str, Any]] = json.loads(out.read_text())["records"] if out.exists() else []
    done = {(record["task"], record["optimizer"]) for record in records}
    facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "batch": 128, "epochs": epochs}
    for name, task in TASKS.items():
        samples = task.data(data)
        for optimizer, settings in SETTINGS.items():
            if (name, optimizer) in done:
                continue
            start = time.time()
            runs = [Run(seed, options) for options in settings for seed in range(seeds)]
            results = train(task.NET, samples, Plan(optimizer, batch=128, epochs=epochs), runs, device="cuda")
            records += [
                {
                    "task": name, "optimizer": optimizer, "options": dict(result.run.options), "seed": result.run.seed,
                    "test": result.test_error[-1], "train": result.train_error[-1],
                }
                for result in results
            ]  # fmt: skip
            seconds = time.time() - start
            rate = len(runs) * epochs * len(samples.train_inputs) / seconds
            print(f"{name} {optimizer}: {len(runs)} runs in {seconds:.1f} s, {rate / 1e6:.2f} M samples/s", flush=True)
            out.write_text(json.dumps({"facts": facts, "records": records}))


def spread(errors: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; not a number where a run diverged."""
    if any(math.isnan(error) for error in errors):
        return math.nan, math.nan
    return statistics.fmean(errors), statistics.stdev(errors)


def table(path: Path) -> None:
    """Print the tables in Markdown."""
    stored = json.loads(path.read_text())
    print(f"{stored['facts']}\n")
    for name in TASKS:
        print(f"### {name}\n\n| optimizer | setting | test error %, mean (std) | the paper |\n|---|---|---|---|")
        for optimizer in SETTINGS:
            cells: dict[str, list[float]] = {}
            for record in stored["records"]:
                if (record["task"], record["optimizer"]) == (name, optimizer):
                    key = ", ".join(f"{option} {value:.6g}" for option, value in record["options"].items())
                    cells.setdefault(key, []).append(100 * record["test"])
            rows = [(*spread(errors), key) for key, errors in cells.items()]
            if not rows:
                continue
            automatic = optimizer.startswith("paper")
            shown = rows if automatic else [min(row for row in rows if not math.isnan(row[0]))]
            for mean, deviation, key in shown:
                theirs, their_deviation = PAPER[name][optimizer]
                print(f"| {optimizer} | {key} | {mean:.2f} ({deviation:.2f}) | {theirs} ({their_deviation}) |")
        print()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.table)
    elif arguments.data and arguments.out:
        run(arguments.data, arguments.out, arguments.seeds, arguments.epochs)
    else:
        parser.error("give --data and --out to train, or --table to print what was stored")


if __name__ == "__main__":
    main()
