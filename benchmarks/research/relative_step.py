"""Research: a step relative to the size of the weights, decayed by the noise, over whole runs (docs/research.md).

    python3 benchmarks/research/relative_step.py --data DIR --out FILE --stage 1

Question: does `step = ρ_t |w| · û/|û|`, ρ_t = min(cap, c / √n_t), with n_t a count of steps that forgets where the
signal is strong, match a tuned constant rate on the paper's CNNs, for all three metrics, every N, and after a shift of
labels?
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from autoopt_lab.engine import RULES, Plan, Run
from autoopt_lab.engine.auto import Automatic
from autoopt_lab.engine.rules import AdaGradMetric, AdamMetric, Identity, State, Step, Trace, divided
from autoopt_lab.engine.train import Chunk, Result, make_backend
from autoopt_lab.tasks import cifar10, mnist

TASKS = {"mnist": mnist, "cifar10": cifar10}


class Relative(Automatic):
    """The candidate. `beta` < 0: the filter V/innovation; `whole` > 0: one norm for the net, not one per tensor."""

    options: ClassVar[Mapping[str, float]] = {
        "c": 0.3, "cap": 0.02, "forget": 0.0, "beta": 0.9, "floor": 0.05, "smooth": 0.99, "window": 8.0, "whole": 0.0,
        "signal": 0.0, "decay": 1.0, "pool": 0.0, "warm": 1.0, "root": 0.0,
    }  # fmt: skip

    def start(self, weights: Tensor) -> State:
        tensor = weights.new_zeros(len(weights), len(self.layout.sizes))
        names = ("variance", "gg", "gm", "mm", "energy", "count")
        return {
            "estimate": torch.zeros_like(weights), "average": weights, "beta_power": tensor + 1,
            "smooth_power": torch.ones_like(weights[:, :1]), "steps": torch.zeros_like(weights[:, :1]),
            **dict.fromkeys(names, tensor),
            **self.metric.start(weights),
        }  # fmt: skip

    def step(self, state: State, weights: Tensor, gradient: Tensor, second: Tensor) -> Step:
        o, total, spread = self.option, self.layout.total, self.layout.spread
        new, h = self.metric.next(state, gradient, o)
        s = self.statistics(gradient, second, state["estimate"], h)
        finite, live = s.usable()
        smooth = o["smooth"]
        new["smooth_power"] = smooth * state["smooth_power"]
        correct = 1 - new["smooth_power"]
        for name, x in zip(("variance", "gg", "gm", "mm"), s, strict=True):
            new[name] = smooth * state[name] + (1 - smooth) * x
        variance, gg, gm, mm = (new[name] / correct for name in ("variance", "gg", "gm", "mm"))
        innovation = gg - 2 * gm + mm
        error = torch.maximum(innovation - variance, 1e-3 * variance)
        beta = torch.minimum(variance / (variance + error + 1e-30), torch.full_like(variance, 0.99))
        beta = torch.where(o["beta"] < 0, beta, o["beta"].expand_as(beta))
        estimate = spread(beta) * state["estimate"] + spread(1 - beta) * gradient
        power = beta * state["beta_power"]
        direction = divided(estimate / spread(1 - power), h)
        size = total(direction * direction)
        energy = smooth * state["energy"] + (1 - smooth) * size
        pooled = o["pool"] > 0
        all_gg, all_v, all_error = (
            torch.where(pooled, x.sum(1, keepdim=True).expand_as(x), x) for x in (gg, variance, error)
        )
        signal = torch.maximum(all_gg - all_v, 1e-3 * all_gg)
        filtered = torch.where(
            o["beta"] < 0, all_v * all_error / (all_v + all_error + 1e-30), all_v * (1 - o["beta"]) / (1 + o["beta"])
        )  # noise that the filter leaves
        share = signal / (all_gg + 1e-30)
        filtered_share = signal / (signal + filtered + 1e-30)
        count = state["count"] * (1 - torch.minimum(o["forget"] * share, torch.ones_like(share))) + 1
        ratio = torch.where(o["decay"] > 0, o["c"] / count.sqrt(), o["c"].expand_as(count))
        used = torch.where(o["signal"] > 1, filtered_share, share)
        ratio = torch.where(o["signal"] > 0, ratio * used.sqrt(), ratio)
        ratio = torch.minimum(ratio, o["cap"].expand_as(count))
        ratio = torch.where(o["root"] > 0, torch.minimum(ratio, o["root"] / count.sqrt()), ratio)
        steps = state["steps"] + 1
        ratio = ratio * torch.minimum(steps / o["warm"], torch.ones_like(steps))
        norm2, numbers = total(weights * weights), self.layout.total(torch.ones_like(weights))
        norm2 = torch.maximum(norm2, o["floor"] * o["floor"] * numbers)
        rms2 = energy / correct
        whole = o["whole"] > 0
        norm2 = torch.where(whole, norm2.sum(1, keepdim=True).expand_as(norm2), norm2)
        rms2 = torch.where(whole, rms2.sum(1, keepdim=True).expand_as(rms2), rms2)
        rate = ratio * norm2.sqrt() / (rms2.sqrt() + 1e-30)
        moved = torch.where(spread(live), weights - spread(rate) * direction, weights)
        newest = (o["window"] + 1) / (count + o["window"])
        average = state["average"] + spread(newest) * (moved - state["average"])
        new |= {
            "steps": steps,
            "estimate": estimate,
            "energy": energy,
            "count": count,
            "beta_power": power,
            "average": average,
        }
        return Step(moved, self.keep(finite, live, state, new), Trace(rate, beta, share))


class Averaging(Chunk):
    """A chunk whose average is the rule's own."""

    def _move(self, gradient: Tensor, second: Tensor) -> None:
        super()._move(gradient, second)
        if "average" in self.state:
            self.averaged.copy_(self.state["average"])


for suffix, metric in (("sgd", Identity), ("adam", AdamMetric), ("adagrad", AdaGradMetric)):
    RULES[f"relative-{suffix}"] = (Relative, metric)


def grid(**axes: list[float]) -> list[dict[str, float]]:
    """All combinations."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


SECOND = [
    *grid(signal=[0.0], beta=[0.9, -1.0], c=[0.1, 0.2, 0.4]),
    *grid(signal=[1.0], beta=[0.9, -1.0], c=[0.2, 0.4, 0.8, 1.6]),
    *grid(signal=[2.0], beta=[0.9, -1.0], c=[0.1, 0.2, 0.4, 0.8]),
    *grid(decay=[0.0], signal=[1.0, 2.0], beta=[0.9, -1.0], pool=[0.0, 1.0], c=[0.005, 0.01, 0.02, 0.04]),
]

THIRD = [
    *grid(decay=[0.0], signal=[1.0], c=[0.01]),  # as in stage 2
    *grid(cap=[0.003, 0.005, 0.008], c=[0.2, 0.3], warm=[100.0]),
    *grid(cap=[0.005], c=[0.3], warm=[1.0]),
    *grid(decay=[0.0], signal=[1.0], cap=[0.006], c=[0.015, 0.02], warm=[100.0], root=[0.0, 0.3]),
    *grid(cap=[0.005], c=[0.3], warm=[100.0], forget=[0.001, 0.003]),
    *grid(cap=[0.005], c=[0.3], warm=[100.0], beta=[-1.0]),
    *grid(cap=[0.01], c=[0.6], warm=[100.0], beta=[-1.0]),
]

STAGES: dict[int, list[tuple[str, int, int | None, list[dict[str, float]], int]]] = {
    # (task, N, epoch of the shift, settings, seeds)
    0: [("mnist", 128, None, grid(c=[0.3]), 1)],
    1: [
        *[(t, 128, None, grid(c=[0.1, 0.2, 0.4, 0.8], cap=[0.02, 0.05], beta=[0.9, -1.0], whole=[0.0, 1.0]), 2)
          for t in ("cifar10", "mnist")],
        *[(t, 128, 5, grid(c=[0.2, 0.4], cap=[0.02], beta=[0.9, -1.0], forget=[0.0, 0.001, 0.003, 0.01, 0.03],
                           whole=[0.0, 1.0]), 1) for t in ("cifar10", "mnist")],
        *[("cifar10", n, None, grid(c=[0.1, 0.2, 0.4, 0.8], cap=[0.02], beta=[0.9, -1.0], whole=[0.0, 1.0]), 1)
          for n in (256, 32)],
    ],
    2: [("cifar10", 128, None, SECOND, 1), ("cifar10", 32, None, SECOND, 1), ("mnist", 128, None, SECOND, 1),
        ("cifar10", 128, 5, SECOND, 1), ("cifar10", 256, None, SECOND, 1), ("cifar10", 8, None, SECOND, 1),
        ("mnist", 8, None, SECOND, 1)],
    3: [("cifar10", 128, None, THIRD, 1), ("mnist", 128, None, THIRD, 1), ("cifar10", 32, None, THIRD, 1),
        ("cifar10", 128, 5, THIRD, 1), ("cifar10", 256, None, THIRD, 1), ("cifar10", 8, None, THIRD, 1),
        ("mnist", 8, None, THIRD, 1)],
}  # fmt: skip


def train(task: Any, data: Path, plan: Plan, runs: list[Run], device: str) -> list[Result]:
    """`engine.train` with the rule's own average."""
    chunk = Averaging(
        task.NET, task.data(data), plan, runs, make_backend("auto", task.NET, device), device, torch.float32
    )
    for epoch in range(plan.epochs):
        chunk.epoch(epoch)
    return chunk.results()


def main() -> None:
    """Train a stage, write one record per run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    records = []
    for name, batch, shift, settings, seeds in STAGES[arguments.stage]:
        for kind in ("sgd", "adam", "adagrad"):
            start = time.time()
            runs = [Run(seed, options) for options in settings for seed in range(seeds)]
            plan = Plan(f"relative-{kind}", batch=batch, epochs=arguments.epochs, average=0.003, shift_at=shift)
            for result in train(TASKS[name], arguments.data, plan, runs, arguments.device):
                assert result.trace is not None
                every = max(1, len(result.trace) // 12)
                records.append(
                    {
                        "task": name, "kind": kind, "batch": batch, "shift": shift, **Relative.options,
                        **result.run.options,
                        "seed": result.run.seed, "test": result.test_error, "average": result.average_test_error,
                        "trace": result.trace[::every, :, :].mean(2).tolist(),
                    }
                )  # fmt: skip
            print(f"{name} {kind} N={batch} shift={shift}: {len(runs)} runs, {time.time() - start:.1f} s", flush=True)
            arguments.out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
