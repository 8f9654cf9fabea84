"""Research: runs of the paper's CNNs by the laboratory's engine on a CPU, plain or with something changed.

    python benchmarks/research/on_cpu.py --data DIR --out FILE --cells cifar10/auto-sgd/128 --seeds 0 1 2 --inputs 0.1

One run after the other, in one thread, float32; several processes, each with a file of its own, use several cores. A
run of ten epochs takes two to four minutes of one core. One line of JSON per run: the error of the last and of the
averaged weights, after a shift also one epoch after it, and ten looks at the momentum, which falls where n is halved
(docs/research.md).
"""

import argparse
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


def trained(cell: str, seed: int, data: Data, given: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    task, optimizer, batch = cell.split("/")
    net = TASKS[task].NET
    backend = Scaled(net)
    backend.factor = given.loss
    plan = Plan(optimizer, int(batch), EPOCHS, shift_at=SHIFT if given.shift else None, train_sample=0)
    chunk = Chunk(net, scaled(data, given.inputs), plan, [Run(seed)], backend, "cpu", torch.float32)
    for epoch in range(EPOCHS):
        chunk.epoch(epoch)
    (result,) = chunk.results()
    errors = {"test": result.test_error, "average": result.average_test_error}
    found = {name: round(error[-1], 5) for name, error in errors.items()}
    if given.shift:
        found |= {f"{name}, one epoch after": round(error[SHIFT], 5) for name, error in errors.items()}
    trace: Tensor | None = result.trace
    assert trace is not None
    looks = [round(point[1].mean().item(), 4) for point in trace[9::10]]
    return {"cell": cell, "seed": seed, "shift": given.shift, "inputs": given.inputs, "loss": given.loss} | {
        **found,
        "momentum": looks,
    }


def main() -> None:
    """Train, and add to the file after each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", required=True, help="TASK/OPTIMIZER/N")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--shift", action="store_true", help="of the labels, at half time")
    parser.add_argument("--inputs", type=float, default=1.0, help="multiplies them")
    parser.add_argument("--loss", type=float, default=1.0, help="multiplies it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = {task: TASKS[task].data(given.data) for task in {cell.split("/")[0] for cell in given.cells}}
    for cell in given.cells:
        for seed in given.seeds:
            record = trained(cell, seed, data[cell.split("/")[0]], given)
            print(cell, seed, record["test"], record["average"], flush=True)
            with given.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
