"""Research: does the shift test stay silent on the paper's CNNs, and does it help when labels shift? (docs/research.md)

    python benchmarks/research/shift_cpu.py --data DIR --out FILE --task mnist --batch 128 --epochs 10 --shift 5

One run on one CPU core: test error in % after every epoch, of the last and of the averaged weights (windows 4 and 8),
and in which epochs n was halved. Labels become y -> (3y + 1) mod 10 after `--shift` epochs. Appends one line to FILE.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from robust import Robust
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt.capture import Capture
from autoopt_lab.tasks import cifar10, mnist

TASKS = {"mnist": mnist, "cifar10": cifar10}


class Wider(Robust):
    """The rule with a second average, of window 8, beside its own."""

    def __init__(self, weights: list[Tensor], **options: float | str) -> None:
        super().__init__(weights, **options)  # type: ignore[arg-type]
        self.others = [w.clone() for w in weights]

    def step(self, gradients: list[Tensor], seconds: list[Tensor], samples: int) -> None:
        super().step(gradients, seconds, samples)
        share = min(1.0, 9 / (self.count.item() + 8))
        for average, w in zip(self.others, self.weights, strict=True):
            average.lerp_(w, share)


@torch.no_grad()
def test_error(model: torch.nn.Module, weights: list[Tensor], x: Tensor, y: Tensor) -> float:
    """In %, with these weights."""
    named = {name: w[0] for (name, _), w in zip(model.named_parameters(), weights, strict=True)}
    model.eval()
    wrong = sum(
        (torch.func.functional_call(model, named, (xs,)).argmax(1) != ys).sum().item()
        for xs, ys in zip(x.split(1000), y.split(1000), strict=True)
    )
    model.train()
    return 100 * wrong / len(y)


def train(arguments: argparse.Namespace, options: dict[str, float]) -> dict[str, object]:
    """The whole run."""
    N, task = arguments.batch, TASKS[arguments.task]
    data = task.data(arguments.data)
    torch.manual_seed(arguments.seed)
    model = task.model().train()
    named = dict(model.named_parameters())
    capture = Capture(model, named, elementwise=True)
    rule = Wider([p.data[None] for p in named.values()], metric=arguments.metric, **options)
    order = torch.Generator().manual_seed(arguments.seed)
    y, test_y = data.train_targets, data.test_targets
    errors: list[list[float]] = []
    for epoch in range(arguments.epochs):
        if epoch == arguments.shift:
            y, test_y = (3 * y + 1) % 10, (3 * test_y + 1) % 10
        for index in torch.randperm(len(y), generator=order)[: len(y) // N * N].view(-1, N):
            model.zero_grad()
            capture.clear()
            F.nll_loss(model(data.train_inputs[index]), y[index]).backward()
            seconds = [capture.second_moment(name) for name in named]
            rule.step([p.grad[None] for p in named.values()], [s[None] for s in seconds if s is not None], N)  # type: ignore[index]
        kinds = (rule.weights, rule.averages, rule.others)
        capture.detach()
        errors.append([test_error(model, kind, data.test_inputs, test_y) for kind in kinds])
        capture = Capture(model, named, elementwise=True)
        print(epoch + 1, errors[-1], flush=True)
    fired = torch.cat(rule.fired).float()
    steps = len(y) // N
    return {"errors": errors, "halved": [int(part.sum()) for part in fired.split(steps)]}


def main() -> None:
    """One run, one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="mnist")
    parser.add_argument("--metric", choices=("sgd", "adam", "adagrad"), default="sgd")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--shift", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="constants of the rule")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = {name: float(value) for name, _, value in (pair.partition("=") for pair in arguments.option)}
    start = time.time()
    found = train(arguments, options)
    keys = ("task", "metric", "batch", "epochs", "shift", "seed")
    record = {**{key: getattr(arguments, key) for key in keys}, **options, **found}
    with arguments.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{record}; {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
