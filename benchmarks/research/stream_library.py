"""Research: the stream of stream.py, trained by the library itself (docs/research.md).

    python benchmarks/research/stream_library.py --out FILE [--seeds 5] [--measure-every 1]       # CPU, one core

The same teachers, samples and initial weights; an nn.Sequential, `loss.backward(); opt.step()`, `with opt.averaged()`.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from stream import BATCH, CHANGE, LOOKS, SIZES, Stream
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoSGD

KINDS = {"sgd": AutoSGD, "adam": AutoAdam, "adagrad": AutoAdaGrad}


class One(Stream):
    """The teacher and the samples of one seed."""

    def __init__(self, seed: int) -> None:
        self.generators = [torch.Generator().manual_seed(1000 + seed)]
        self.change()


def make_model(seed: int) -> nn.Sequential:
    """The MLP with torch's own start, in the order of stream.initial."""
    torch.manual_seed(seed)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(SIZES)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


@torch.no_grad()
def excess(model: nn.Module, x: Tensor, truth: Tensor) -> float:
    """The cross-entropy to the teacher less the teacher's entropy."""
    return (truth.exp() * (truth - model(x).log_softmax(-1))).sum(-1).mean().item()


def run(kind: str, seed: int, every: int) -> dict[str, list[float]]:
    """The excess at every look."""
    stream, model = One(seed), make_model(seed)
    optimizer = KINDS[kind](model, measure_every=every)
    found: dict[str, list[float]] = {"last": [], "average": []}
    for t in range(1, LOOKS[-1] + 1):
        x, y, _ = stream.batch(BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(x[0]), y[0]).backward()
        optimizer.step()
        if t in LOOKS:
            x, _, truth = stream.batch(8192)
            found["last"].append(excess(model, x[0], truth[0]))
            with optimizer.averaged():
                found["average"].append(excess(model, x[0], truth[0]))
        if t == CHANGE:
            stream.change()
    return found


def main() -> None:
    """Print one line per optimizer, write every seed's figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--measure-every", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records: dict[str, dict[str, list[list[float]]]] = {}
    for kind in KINDS:
        start = time.time()
        runs = [run(kind, seed, arguments.measure_every) for seed in range(arguments.seeds)]
        records[kind] = {name: [one[name] for one in runs] for name in ("last", "average")}
        last, average = (torch.tensor(records[kind][name]).mean(0).tolist() for name in ("last", "average"))
        words = " / ".join(f"{x:.4f}" for x in last), " / ".join(f"{x:.4f}" for x in average)
        print(f"{kind}: {words[0]} ({words[1]}); {time.time() - start:.0f} s", flush=True)
        arguments.out.write_text(json.dumps({"steps": LOOKS, **records}))


if __name__ == "__main__":
    main()
