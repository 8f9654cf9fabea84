"""Research: the best cell of the paper's grid at other batch sizes, one seed: what the candidates are held against.

python3 benchmarks/research/grid_cells.py --data DIR --out FILE
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.engine import Plan, Run, train
from autoopt_lab.tasks import cifar10, mnist

RATES = [10 ** (-k / 2) for k in range(9)]
SETTINGS = {
    "sgd": [{"lr": lr, "momentum": m} for lr in RATES for m in (0.0, 0.3, 0.8, 0.9, 0.95, 0.99)],
    "adam": [{"lr": lr} for lr in RATES],
    "adagrad": [{"lr": lr} for lr in RATES],
}
PARTS = [(cifar10, 32), (cifar10, 256), (cifar10, 8), (mnist, 8)]


def main() -> None:
    """Train the cells, write the final test error of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    records = []
    for task, batch in PARTS:
        for optimizer, settings in SETTINGS.items():
            start = time.time()
            plan = Plan(optimizer, batch=batch, epochs=10)
            for r in train(task.NET, task.data(arguments.data), plan, [Run(0, o) for o in settings], device="cuda"):
                name = task.__name__.rpartition(".")[2]
                records.append([name, batch, optimizer, dict(r.run.options), r.test_error[-1], r.train_error[-1]])
            arguments.out.write_text(json.dumps(records))
            print(f"{task.__name__} {optimizer} N={batch}: {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
