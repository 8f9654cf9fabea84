"""Research: runs of the paper's CNNs by the laboratory's engine on a CPU, plain or with something changed.

    python benchmarks/research/on_cpu.py --data DIR --out FILE --cells cifar10/auto-sgd/128 --seeds 0 1 2 --inputs 0.1
    python benchmarks/research/on_cpu.py --data DIR --out FILE --cells mnist/adam/128 --rates 1e-3 3e-3 --seeds 0 1

One run after the other, in one thread, float32; several processes, each with a file of its own, use several cores. A
run of ten epochs takes two to four minutes of one core. One line of JSON per run: the error of the last and of the
averaged weights, after a shift also one epoch after it, and ten looks at the momentum, which falls where n is halved
(docs/research.md). What has to be given a rate, as sgd, adam and adagrad, runs once with each; it keeps no average.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.engine import Plan, Run
from autoopt_lab.engine.reference import Gradients, Reference
from autoopt_lab.engine.train import Chunk
from autoopt_lab.paper import PLAIN, grid
from autoopt_lab.tasks import Data, cifar10, mnist

TASKS: dict[str, Any] = {"mnist": mnist, "cifar10": cifar10}
EPOCHS, SHIFT = 10, 5


class Scaled(Reference):
    """A loss that is multiplied by a number."""

    factor = 1.0

    def gradients(self, *args: Any) -> Gradients:
        found = super().gradients(*args)
        return found._replace(gradient=found.gradient * self.factor, second=found.second * self.factor**2)


def scaled(data: Data, factor: float) -> Data:
    """With other inputs."""
    return Data(data.train_inputs * factor, data.train_targets, data.test_inputs * factor, data.test_targets)


def settings(cell: str, given: argparse.Namespace) -> tuple[dict[str, float], ...]:
    """What to run a cell with: the paper's options at each rate, or nothing where the rule is automatic."""
    optimizer = cell.split("/")[1]
    if (optimizer in PLAIN) != bool(given.rates):
        sys.exit(f"{cell}: --rates are for {', '.join(PLAIN)}, which have to have them, and for no other")
    return grid(optimizer, given.rates, [given.momentum]) if given.rates else ({},)


def trained(cell: str, seed: int, options: dict[str, float], data: Data, given: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    task, optimizer, batch = cell.split("/")
    net = TASKS[task].NET
    backend = Scaled(net)
    backend.factor = given.loss
    plan = Plan(optimizer, int(batch), EPOCHS, shift_at=SHIFT if given.shift else None, train_sample=0)
    chunk = Chunk(net, scaled(data, given.inputs), plan, [Run(seed, options)], backend, "cpu", torch.float32)
    for epoch in range(EPOCHS):
        chunk.epoch(epoch)
    (result,) = chunk.results()
    errors = {"test": result.test_error, "average": result.average_test_error}
    errors = {name: error for name, error in errors.items() if error}
    found: dict[str, Any] = {name: round(error[-1], 5) for name, error in errors.items()}
    if given.shift:
        found |= {f"{name}, one epoch after": round(error[SHIFT], 5) for name, error in errors.items()}
    trace: Tensor | None = result.trace
    if trace is not None:
        found["momentum"] = [round(point[1].mean().item(), 4) for point in trace[9::10]]
    changed = {"shift": given.shift, "inputs": given.inputs, "loss": given.loss}
    return {"cell": cell, "seed": seed, **changed, **({"options": options} if options else {}), **found}


def main() -> None:
    """Train, and add to the file after each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", required=True, help="TASK/OPTIMIZER/N")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="for sgd, adam and adagrad")
    parser.add_argument("--momentum", type=float, default=0.9, help="for sgd")
    parser.add_argument("--shift", action="store_true", help="of the labels, at half time")
    parser.add_argument("--inputs", type=float, default=1.0, help="multiplies them")
    parser.add_argument("--loss", type=float, default=1.0, help="multiplies it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = {task: TASKS[task].data(given.data) for task in {cell.split("/")[0] for cell in given.cells}}
    runs = [(cell, options) for cell in given.cells for options in settings(cell, given)]
    for (cell, options), seed in itertools.product(runs, given.seeds):
        record = trained(cell, seed, options, data[cell.split("/")[0]], given)
        print(cell, options, seed, record["test"], record.get("average", ""), flush=True)
        with given.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
