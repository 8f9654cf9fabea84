"""Checks the engine's promises on a GPU, as a part of engine_gpu.py; and on a CPU that runs are the same in company.

    python benchmarks/engine_checks.py --out docs/results/engine_alone.json

There 256 sampled settings are trained alone, and among three others of which one diverges, in float64 and float32.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_cases import BATCHES, NETS, OPTIONS, fused, random_data

from autoopt_lab.devices import processes
from autoopt_lab.engine import RULES, Plan, Run, train
from autoopt_lab.engine import random as draws
from autoopt_lab.engine.evaluate import evaluate
from autoopt_lab.engine.reference import Reference
from autoopt_lab.engine.train import Chunk
from autoopt_lab.tasks import Data

PRECISIONS = ("ieee", "tf32x3", "tf32")


def against_float64(name: str, precision: str, rule: str, steps: int = 6) -> float:
    """Largest difference of the parameters from CPU float64 after a few steps, relative to their largest change."""
    net = NETS[name]
    data = random_data(net, 64, "cpu")
    rows = [Run(seed, OPTIONS.get(rule, {})) for seed in (1, 2, 3)]
    plan = Plan(rule, batch=16, epochs=1)
    here = Chunk(net, data, plan, rows, fused(net, precision), "cuda", torch.float32)
    there = Chunk(net, data, plan, rows, Reference(net), "cpu", torch.float64)
    before = there.weights.clone()
    for chunk in (here, there):
        go = chunk.captured()
        chunk.order.copy_(torch.arange(chunk.order.numel()).view(chunk.order.shape) % 64)
        for _ in range(steps):
            go()
    difference = (here.weights.cpu() - there.weights).abs().max()
    return float(difference / (there.weights - before).abs().max())


def trained(
    name: str,
    data: Data,
    rule: str,
    batch: int,
    rows: Sequence[Run],
    steps: int,
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Chunk:
    """A chunk after some steps of the orders and dropout that belong to its seeds, where the data is."""
    net, device = NETS[name], data.train_inputs.device
    backend = fused(net) if device.type == "cuda" else Reference(net)
    chunk = Chunk(net, data, Plan(rule, batch, epochs=1), rows, backend, device, dtype, compiled)
    chunk.order.copy_(draws.orders(chunk.seeds, 0, len(data.train_inputs))[:, : chunk.order.shape[1]])
    go = chunk.captured()
    for _ in range(steps):
        go()
    return chunk


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of NaN."""
    bits = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.view(bits), b.view(bits))


def alone(name: str, rule: str, compile_update: bool = False, steps: int = 40) -> bool:
    """Whether a run in company (one of them diverging) has the bits of the run alone."""
    options = OPTIONS.get(rule, {})
    company = [Run(2, options), Run(9, {"lr": 1e30}), Run(1, options), *[Run(s, options) for s in range(40)]]
    data = random_data(NETS[name], 2000, "cuda")
    one, many = (
        trained(name, data, rule, 32, rows, steps, compile_update).weights for rows in ([Run(1, options)], company)
    )
    return same_bits(one[0], many[2])


def at_once(epochs: int = 2) -> dict[str, bool]:
    """Whether chunks that train at once, on threads of one process, have the bits of chunks one after the other."""
    data = {name: random_data(net, 4096, "cuda") for name, net in NETS.items()}
    jobs = [(name, rule) for name in NETS for rule in ("sgd", "adam", "auto-adam")]

    def weights(name: str, rule: str) -> torch.Tensor:
        runs = [Run(seed, OPTIONS.get(rule, {})) for seed in range(10)]
        results = train(NETS[name], data[name], Plan(rule, 32, epochs), runs, device="cuda")
        return torch.stack([result.weights for result in results])

    apart = [weights(*job) for job in jobs]
    with processes(["cuda:0"] * len(jobs)) as pool:
        together = [future.result() for future in [pool.submit(weights, *job) for job in jobs]]
    return {" ".join(job): same_bits(a, b) for job, a, b in zip(jobs, apart, together, strict=True)}


def setting(rule: str, generator: random.Random) -> Run:
    seed = generator.randrange(10_000)
    if rule.startswith("paper"):
        return Run(seed, {"smoothing": generator.choice((0.9, 0.99, 0.999, 0.9999)), "lr": generator.uniform(0.3, 1)})
    if rule.startswith("auto"):
        return Run(seed, {"lr": generator.uniform(0.3, 1)})
    low, high = (-5, -2) if rule == "adam" else (-4, 0)
    options = {"lr": 10 ** generator.uniform(low, high), "momentum": generator.choice((0.0, 0.3, 0.8, 0.9, 0.99))}
    return Run(seed, options)


def sampled(
    settings: int = 256,
    steps: int = 120,
    neighbours: int = 12,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Settings of every net, rule and batch size: trained alone, and among other settings of which one diverges."""
    begun = time.perf_counter()
    generator = random.Random(0)
    data = {name: random_data(net, 4096, device) for name, net in NETS.items()}
    groups = [(name, rule, batch) for name in NETS for rule in RULES for batch in BATCHES]
    found: dict[str, Any] = {
        "settings": 0,
        "steps": steps,
        "bit_equal": 0,
        "not_finite": 0,
        "largest": 0.0,
        "worst": "",
    }
    for i, (name, rule, batch) in enumerate(groups):
        count = settings * (i + 1) // len(groups) - settings * i // len(groups)
        rows = [setting(rule, generator) for _ in range(count)]
        others = [setting(rule, generator) for _ in range(neighbours - 1)] + [Run(0, {"lr": 1e30})]
        company = trained(name, data[name], rule, batch, [*others, *rows], steps, dtype=dtype)
        losses = loss(company)[neighbours:]
        for k, row in enumerate(rows):
            single = trained(name, data[name], rule, batch, [row], steps, dtype=dtype)
            together, apart = losses[k], loss(single)[0]
            found["settings"] += 1
            found["bit_equal"] += same_bits(single.weights[0], company.weights[neighbours + k])
            if math.isfinite(together) and math.isfinite(apart):
                difference = abs(together - apart) / abs(apart)
            else:  # both diverged, or the promise is broken
                found["not_finite"] += 1
                difference = 0.0 if str(together) == str(apart) else math.inf
            if difference > found["largest"]:
                found |= {"largest": difference, "worst": f"{name} {rule} N={batch} {row}"}
    found["passed"] = found["settings"] == settings and found["largest"] <= 1e-4
    found["seconds"] = round(time.perf_counter() - begun, 1)
    return found


def loss(chunk: Chunk) -> list[float]:
    """Of every run on a thousand images."""
    values: list[float] = evaluate(chunk.backend, chunk.weights, chunk.images[:1000], chunk.labels[:1000]).loss.tolist()
    return values


def effect_of_precision(name: str, data: Data, rule: str, seeds: int = 16) -> dict[str, Any]:
    """Test error after one epoch at N = 128, in per cent: mean and standard deviation over seeds, per precision."""
    options = {"sgd": {"lr": 0.1, "momentum": 0.9}}.get(rule, {})
    row: dict[str, Any] = {"net": name, "rule": rule, "seeds": seeds}
    for precision in PRECISIONS:
        runs = [Run(seed, options) for seed in range(seeds)]
        results = train(NETS[name], data, Plan(rule, 128, epochs=1), runs, device="cuda", precision=precision)
        errors = [100 * result.test_error[-1] for result in results]
        row[precision] = [round(statistics.mean(errors), 3), round(statistics.stdev(errors), 3)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--settings", type=int, default=256)
    parser.add_argument("--precisions", nargs="+", default=["float64", "float32"], choices=["float64", "float32"])
    parser.add_argument("--out", type=Path, help="what is there already of the other precision stays")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"device": "CPU, one thread", "torch": torch.__version__, "machine": platform.machine()}
    if options.out and options.out.exists():
        found = json.loads(options.out.read_text()) | found
    for kind in options.precisions:
        dtype = getattr(torch, kind)
        found[kind] = sampled(options.settings, options.steps, neighbours=3, device="cpu", dtype=dtype)
        print(kind, json.dumps(found[kind]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
