"""Research: a stream whose teacher changes (issue 6, docs/research.md).

    python benchmarks/research/stream.py --out FILE        # CPU, one core: about half a minute per line

x ~ N(0, I_64), labels drawn from softmax(xW), W a 64 x 10 matrix of N(0, 0.35²), fresh batches of 128, an MLP
64-256-256-10 with ReLU, a new W after 1500 of 3000 steps. Printed: the excess cross-entropy over the teacher's entropy
on 8,192 fresh samples just before the change, 300 and 1500 steps after it, mean over the seeds, of the last weights and
(in brackets) of the averaged ones. All seeds run side by side.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from robust import Robust
from torch import Tensor

SIZES, BATCH, CHANGE, LOOKS = (64, 256, 256, 10), 128, 1500, (1500, 1800, 3000)
LAYERS = len(SIZES) - 1


class Stream:
    """A teacher and its samples for every seed."""

    def __init__(self, seeds: int) -> None:
        self.generators = [torch.Generator().manual_seed(1000 + seed) for seed in range(seeds)]
        self.change()

    def change(self) -> None:
        """A new teacher."""
        self.teacher = torch.stack([0.35 * torch.randn(64, 10, generator=g) for g in self.generators])

    def batch(self, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, y and the logarithm of the teacher's probabilities."""
        x = torch.stack([torch.randn(samples, 64, generator=g) for g in self.generators])
        uniform = torch.stack([torch.rand(samples, 10, generator=g) for g in self.generators])
        truth = (x @ self.teacher).log_softmax(-1)
        return x, (truth - (-uniform.log()).log()).argmax(-1), truth


def initial(seeds: int) -> list[Tensor]:
    """torch's own start of each layer: weight, bias, weight, ..."""
    runs = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(i, o) for i, o in itertools.pairwise(SIZES)]
        runs.append([p.detach() for layer in layers for p in (layer.weight, layer.bias)])
    return [torch.stack(tensors) for tensors in zip(*runs, strict=True)]


def forward(weights: list[Tensor], x: Tensor) -> list[Tensor]:
    """The input of every layer, and the logits."""
    values = [x]
    for k in range(LAYERS):
        x = torch.baddbmm(weights[2 * k + 1][:, None], x, weights[2 * k].transpose(1, 2))
        x = x.relu_() if k < LAYERS - 1 else x
        values.append(x)
    return values


def backward(weights: list[Tensor], x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """g and Σ_i c_i² of the mean cross-entropy, by hand: a sample adds the product of its two factors."""
    values = forward(weights, x)
    delta = values[-1].softmax(-1)
    delta.sub_(torch.nn.functional.one_hot(y, SIZES[-1])).div_(y.shape[1])
    gradients, seconds = [], []
    for k in reversed(range(LAYERS)):
        value, square = values[k], delta * delta
        gradients += [delta.sum(1), torch.bmm(delta.transpose(1, 2), value)]
        seconds += [square.sum(1), torch.bmm(square.transpose(1, 2), value * value)]
        if k:
            delta = torch.bmm(delta, weights[2 * k]).mul_(value > 0)
    return gradients[::-1], seconds[::-1]


class AdamW:
    """torch's defaults (rate 1e-3, decay 0.01), the anchor; its average is a moving one over about 333 steps."""

    def __init__(self, weights: list[Tensor], average: float = 0.003) -> None:
        self.weights, self.averages, self.average = weights, [w.clone() for w in weights], average
        self.adam = torch.optim.AdamW(weights)

    def step(self, gradients: list[Tensor], seconds: list[Tensor], samples: int) -> None:
        """One update; elementwise, so that runs side by side do not see each other."""
        del seconds, samples
        for w, g in zip(self.weights, gradients, strict=True):
            w.grad = g
        self.adam.step()
        for w, a in zip(self.weights, self.averages, strict=True):
            a.lerp_(w, self.average)


@torch.no_grad()
def run(
    seeds: int, make: Callable[[list[Tensor]], Robust | AdamW]
) -> tuple[dict[str, list[list[float]]], Robust | AdamW]:
    """The excess at every look, one value per seed, of the last and of the averaged weights."""
    weights, stream = initial(seeds), Stream(seeds)
    optimizer = make(weights)
    found: dict[str, list[list[float]]] = {"last": [], "average": []}
    for t in range(1, LOOKS[-1] + 1):
        x, y, _ = stream.batch(BATCH)
        optimizer.step(*backward(weights, x, y), BATCH)
        if t in LOOKS:
            x, _, truth = stream.batch(8192)
            for name, used in (("last", weights), ("average", optimizer.averages)):
                guess = forward(used, x)[-1].log_softmax(-1)
                found[name].append((truth.exp() * (truth - guess)).sum(-1).mean(-1).tolist())
        if t == CHANGE:
            stream.change()
    return found, optimizer


def main() -> None:
    """Print one line per optimizer, write every seed's figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    makers: dict[str, Callable[[list[Tensor]], Robust | AdamW]] = {"AdamW 1e-3": AdamW}
    for threshold, words in ((0.3, ""), (0.0, ", no shift test")):
        for metric in ("sgd", "adam", "adagrad"):
            makers[f"robust {metric}{words}"] = functools.partial(Robust, metric=metric, threshold=threshold)
    records = {}
    for name, make in makers.items():
        start = time.time()
        found, optimizer = run(arguments.seeds, make)
        records[name] = {"steps": LOOKS, **found}
        means = [" / ".join(f"{sum(x) / len(x):.4f}" for x in found[kind]) for kind in ("last", "average")]
        words = ""
        if isinstance(optimizer, Robust) and optimizer.threshold:
            fired = torch.stack(optimizer.fired).float()
            parts = {"200-1500": fired[200:1500], "to +100": fired[1500:1600], "later": fired[1600:]}
            words = ", n halved: " + ", ".join(f"{k} {x.sum(0).mean():.1f}" for k, x in parts.items())
        print(f"{name}: {means[0]} ({means[1]}){words}; {time.time() - start:.0f} s", flush=True)
        arguments.out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
