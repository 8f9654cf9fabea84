"""Research: which statistic tells a shift of the labels from noise, at every batch size? (docs/research.md)

    python benchmarks/research/shift_trace.py --data DIR --out FILE --task cifar10 --batch 128 --steps 1800 --shift 1200

One run of the rule on one CPU core. Of each statistic the largest value in every phase, mean over the tensors:
- "variance": the average of <g_t, u_{t-1}> over ten steps, over that of V over a hundred, which is the library's;
- "itself": the same over its own root mean square over the hundred steps before.
Appends one line to FILE.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from robust import TINY, Robust
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt.capture import Capture
from autoopt_lab.tasks import cifar10, mnist

TASKS = {"mnist": mnist, "cifar10": cifar10}


class Traced(Robust):
    """The rule, which notes V and <g,u> of every tensor at every step."""

    def __init__(self, weights: list[Tensor], metric: str) -> None:
        super().__init__(weights, metric)
        self.trace: list[Tensor] = []  # (2, tensors) for every step

    def decide(self, variance: Tensor, gu: Tensor, size: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        self.trace.append(torch.stack([variance[0], gu[0]]))
        return super().decide(variance, gu, size, norm)


def train(arguments: argparse.Namespace) -> Traced:
    """The run, whose labels become y -> (3y + 1) mod 10 at the shift."""
    task, N = TASKS[arguments.task], arguments.batch
    data = task.data(arguments.data)
    torch.manual_seed(arguments.seed)
    model = task.model().train()
    named = dict(model.named_parameters())
    capture = Capture(model, named, elementwise=True)
    rule = Traced([p.data[None] for p in named.values()], arguments.metric)
    y, order = data.train_targets, torch.Generator().manual_seed(arguments.seed)
    epochs = (torch.randperm(len(y), generator=order)[: len(y) // N * N].view(-1, N) for _ in itertools.count())
    for step, index in enumerate(itertools.islice(itertools.chain.from_iterable(epochs), arguments.steps)):
        if step == arguments.shift:
            y = (3 * y + 1) % 10
        model.zero_grad()
        capture.clear()
        F.nll_loss(model(data.train_inputs[index]), y[index]).backward()
        seconds = [capture.second_moment(name) for name in named]
        rule.step([p.grad[None] for p in named.values()], [s[None] for s in seconds if s is not None], N)  # type: ignore[index]
    return rule


def statistics(trace: Tensor) -> Iterator[dict[str, float]]:
    """Both, for every step from the third on."""
    variance, gu = trace.unbind(1)
    aligned, noise, square = (torch.zeros_like(gu[0]) for _ in range(3))
    for t in range(1, len(gu)):
        noise = 0.99 * noise + 0.01 * variance[t - 1]
        now = gu[t] / (1 - 0.9**t)
        aligned = 0.9 * aligned + 0.1 * now
        steady = aligned / (1 - 0.9**t)
        if t > 1:
            usual = (square / (1 - 0.99 ** (t - 1))).sqrt()
            ratios = {"variance": steady / (noise / (1 - 0.99**t) + TINY), "itself": steady / (usual + TINY)}
            yield {name: ratio.mean().item() for name, ratio in ratios.items()}
        square = 0.99 * square + 0.01 * now.square()


def main() -> None:
    """One run, one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="cifar10")
    parser.add_argument("--metric", choices=("sgd", "adam", "adagrad"), default="sgd")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--shift", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rule = train(arguments)
    found = list(statistics(torch.stack(rule.trace)))
    shift = arguments.shift - 2  # `found` begins with the third step
    phases = {"first 200": slice(0, 198), "steady": slice(198, shift), "shift + 60": slice(shift, shift + 60)}
    record = {key: getattr(arguments, key) for key in ("task", "metric", "batch", "steps", "shift", "seed")} | {
        "largest": {name: {p: max(f[name] for f in found[part]) for p, part in phases.items()} for name in found[0]},
        "halved": {name: int(torch.cat(rule.fired)[1:][part].sum()) for name, part in phases.items()},
    }
    with arguments.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(record)


if __name__ == "__main__":
    main()
