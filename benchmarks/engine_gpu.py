"""Checks and times the vectorised engine on one GPU.

    python3 benchmarks/engine_gpu.py --out DIR [--data DIR] [--quick]

Needs torch, Triton and numpy alone. Writes DIR/engine_gpu.json; the tables are printed last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from autoopt_lab.engine import RULES, Net, Plan, Run
from autoopt_lab.engine.reference import Reference
from autoopt_lab.engine.train import Backend, Chunk
from autoopt_lab.tasks import Data, cifar10, mnist

NETS = {"cifar10": cifar10.NET, "mnist": mnist.NET}
BATCHES = (8, 16, 32, 64, 128, 256)
PEAK = {"tf32": 494e12, "float32": 67e12, "bytes": 4.8e12}  # H200, by its datasheet, dense
OPTIONS: dict[str, dict[str, float]] = {"sgd": {"lr": 0.01, "momentum": 0.9}, "adam": {}, "adagrad": {}}
LAUNCHES = {
    "forward": [
        {"BM": 64}, {"BM": 64, "num_stages": 3}, {"BM": 128, "num_warps": 8}, {"BM": 256, "num_warps": 8},
        {"BM": 128, "BE": 16, "num_stages": 3}, {"BM": 128, "BE": 32, "num_stages": 1}, {"BM": 64, "BE": 32},
        {"BM": 32},
    ],
    "window_gradient": [
        {"BM": 64}, {"BM": 64, "BE": 32}, {"BM": 128, "BE": 32}, {"BM": 128, "BE": 128, "num_warps": 8},
        {"BM": 128, "num_warps": 8}, {"BM": 64, "num_stages": 1}, {"BM": 128, "BK": 16}, {"BM": 32, "BE": 64},
    ],
    "conv_weight_gradient": [
        {"BP": 32, "BE": 64}, {"BP": 64, "BE": 64}, {"BP": 64, "BE": 128}, {"BP": 64, "BE": 128, "num_warps": 8},
        {"BP": 32, "BE": 128, "num_stages": 3}, {"BP": 32, "BE": 64, "num_stages": 1}, {"BP": 64, "BE": 32},
        {"BP": 16, "BE": 64},
    ],
    "linear_weight_gradient": [
        {"BN": 32, "BE": 32}, {"BN": 32, "BE": 128}, {"BN": 64, "BE": 64}, {"BN": 32, "BE": 64, "BO": 32},
        {"BN": 32, "BE": 64, "num_stages": 1}, {"BN": 32, "BE": 128, "BO": 64, "num_warps": 8}, {"BN": 16, "BE": 64},
        {"BN": 64, "BE": 128, "num_warps": 8},
    ],
    "fold": [{"BLOCK": b, "num_warps": w} for b in (128, 256, 1024, 2048) for w in (2, 4)],
    "collect": [{"BLOCK": b, "num_warps": w} for b in (32, 64, 256, 512) for w in (1, 4)],
}  # fmt: skip


def log(*words: object) -> None:
    print(*words, flush=True)


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """A part that fails is reported, and the rest goes on."""
    try:
        yield
    except Exception:
        log(f"--- FAILED: {what}")
        traceback.print_exc(file=sys.stdout)
        torch.cuda.synchronize()


def fused(net: Net, precision: str = "tf32x3") -> Any:
    from autoopt_lab.engine.fused import Fused

    return Fused(net, precision)


def random_data(net: Net, samples: int, device: str) -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *net.image, generator=generator).to(device)
    targets = torch.randint(net.classes, (samples,), generator=generator).to(device)
    return Data(inputs, targets, inputs[: samples // 5], targets[: samples // 5])


def runs_for(batch: int) -> int:
    return min(1024, 16384 // batch)


def make(net: Net, data: Data, rule: str, runs: int, batch: int, backend: Backend, **options: Any) -> Chunk:
    rows = [Run(seed % 8, OPTIONS.get(rule, {})) for seed in range(runs)]
    return Chunk(net, data, Plan(rule, batch, epochs=1), rows, backend, "cuda", torch.float32, **options)


# -- build ----------------------------------------------------------------------------------------------------------


def build(job: tuple[str, int, str, bool, int | None]) -> float:
    """Compiles the kernels of one configuration into Triton's cache on disk (in a worker process)."""
    name, batch, precision, moments, launch = job
    start = time.perf_counter()
    try:
        torch.set_num_threads(1)
        backend = fused(NETS[name], precision)
        set_launches(backend, launch)
        kernel_times(NETS[name], backend, 2, batch, moments, repeats=1)
    except Exception as error:
        log(f"build {job}: {type(error).__name__}: {str(error)[:300]}")
    return time.perf_counter() - start


def set_launches(backend: Any, which: int | None) -> None:
    backend.tuning = {}
    if which is not None:
        backend.tuning = {(k, s.name): v[which] for k, v in LAUNCHES.items() for s in backend.net.stages}


def one_gradient(net: Net, backend: Any, runs: int, batch: int, moments: bool) -> Callable[[], Any]:
    weights = net.initial(0).repeat(runs, 1).cuda()
    channels, height, width = net.image
    images = torch.randn(runs, batch, height, width, channels, device="cuda")
    labels = torch.randint(net.classes, (runs, batch), device="cuda")
    factors = torch.ones(runs, batch, net.droppable, device="cuda") if net.droppable else None
    return lambda: backend.gradients(weights, images, labels, factors, moments)


def build_all(quick: bool) -> None:
    jobs: list[tuple[str, int, str, bool, int | None]] = []
    for name in NETS:
        jobs += [(name, batch, "tf32x3", moments, None) for batch in BATCHES for moments in (False, True)]
        jobs += [(name, 16, p, m, None) for p in ("ieee", "tf32") for m in (False, True)]
        jobs += [(name, 128, p, False, None) for p in ("ieee", "tf32")]
        if not quick:
            jobs += [(name, batch, "tf32x3", False, i) for i in range(8) for batch in (128,)]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        spent = pool.map(build, jobs, chunksize=1)
    log(f"built {len(jobs)} configurations in {time.perf_counter() - start:.0f} s ({sum(spent):.0f} s of work)")


# -- correctness ----------------------------------------------------------------------------------------------------


def check(name: str, precision: str, rule: str, steps: int = 6) -> float:
    """Largest difference of the parameters from CPU float64 after a few steps, relative to their largest change."""
    net = NETS[name]
    data = random_data(net, 64, "cpu")
    rows = [Run(seed, OPTIONS.get(rule, {})) for seed in (1, 2, 3)]
    plan = Plan(rule, batch=16, epochs=1)
    here = Chunk(net, data, plan, rows, fused(net, precision), "cuda", torch.float32)
    there = Chunk(net, data, plan, rows, Reference(net), "cpu", torch.float64)
    before = there.weights.clone()
    go = here.captured()
    for chunk, step in ((here, go), (there, there.step)):
        chunk.order.copy_(torch.arange(chunk.order.numel()).view(chunk.order.shape) % 64)
        for _ in range(steps):
            step()
    difference = (here.weights.cpu() - there.weights).abs().max()
    return float(difference / (there.weights - before).abs().max())


def check_alone(name: str, rule: str, steps: int = 40) -> bool:
    """Whether a run in company (one of them diverging) has the bits of the run alone."""
    net = NETS[name]
    data = random_data(net, 2000, "cuda")
    options = OPTIONS.get(rule, {})
    wild = Run(9, {"lr": 1e30})
    chunks = []
    for rows in ([Run(1, options)], [Run(2, options), wild, Run(1, options), *[Run(s, options) for s in range(40)]]):
        chunk = Chunk(net, data, Plan(rule, 32, epochs=1), rows, fused(net), "cuda", torch.float32)
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))[: chunk.order.shape[1]]
        chunk.order.copy_(order.expand_as(chunk.order))
        go = chunk.captured()
        for _ in range(steps):
            go()
        chunks.append(chunk)
    return bool(torch.equal(chunks[0].weights[0], chunks[1].weights[2]))


# -- speed ----------------------------------------------------------------------------------------------------------


def milliseconds(go: Callable[[], object], repeats: int) -> float:
    go()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        go()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def multiply_adds(net: Net) -> int:
    """Per training sample: forward, weight gradient, and input gradient of all but the first layer."""
    forward = [s.affine_size[0] * s.affine_size[1] * s.outputs * s.patch for s in net.stages]
    return 3 * sum(forward) - forward[0]


def speed(
    name: str, data: Data, rule: str, batch: int, backend: Backend, runs: int | None = None, **options: Any
) -> dict[str, Any]:
    runs = runs or runs_for(batch)
    torch.cuda.reset_peak_memory_stats()
    chunk = make(NETS[name], data, rule, runs, batch, backend, **options)
    ms = milliseconds(chunk.captured(), 20)
    rate = runs * batch / ms * 1e3
    return {
        "net": name,
        "rule": rule,
        "batch": batch,
        "runs": runs,
        "ms": round(ms, 4),
        "samples_per_s": round(rate),
        "tflops": round(rate * 2 * multiply_adds(NETS[name]) / 1e12, 2),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


class Timed:
    """Stands in for a kernel: times each launch; one that fails is reported and left out."""

    def __init__(self, name: str, kernel: Any, times: list[tuple[str, float]], repeats: int) -> None:
        self.name, self.kernel, self.times, self.repeats = name, kernel, times, repeats

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            label = f"{self.name} C={options.get('C')} O={options.get('O')}"
            try:
                self.times.append((label, milliseconds(lambda: self.kernel[grid](*arguments, **options), self.repeats)))
            except Exception as error:  # a launch may ask for more shared memory than there is
                log(f"{label} {options}: {type(error).__name__}: {str(error)[:200]}")

        return launch


def kernel_times(
    net: Net, backend: Any, runs: int, batch: int, moments: bool = False, repeats: int = 10
) -> dict[str, float]:
    from autoopt_lab.engine import kernels

    times: list[tuple[str, float]] = []
    names = [*LAUNCHES, "expand"]
    originals = {kernel: getattr(kernels, kernel) for kernel in names}
    try:
        for kernel, original in originals.items():
            setattr(kernels, kernel, Timed(kernel, original, times, repeats))
        one_gradient(net, backend, runs, batch, moments)()
    finally:
        for kernel, original in originals.items():
            setattr(kernels, kernel, original)
    return dict(times)


def tune(name: str, batch: int) -> dict[str, Any]:
    """Every kernel's time with every launch of LAUNCHES, and with the default."""
    net = NETS[name]
    found: dict[str, dict[str, float]] = {}
    for which in (None, *range(8)):
        with attempt(f"tuning {name} {which}"):
            backend = fused(net)
            set_launches(backend, which)
            for label, ms in kernel_times(net, backend, runs_for(batch), batch).items():
                kernel = label.split()[0]
                launch = "default" if which is None else json.dumps(LAUNCHES.get(kernel, [{}] * 8)[which])
                found.setdefault(label, {})[launch] = round(ms * 1e3, 1)
    return found


# -- the whole ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "check": {},
        "alone": {},
        "speed": [],
        "kernels": {},
        "tuning": {},
        "epoch": [],
    }

    def save() -> None:
        (arguments.out / "engine_gpu.json").write_text(json.dumps(results, indent=1))

    def stamp(what: str) -> None:
        save()
        log(f"[{time.perf_counter() - begun:5.0f} s] {what}")

    with attempt("building in parallel"):
        build_all(arguments.quick)
    stamp("built")
    data = {}
    for name, task in (("cifar10", cifar10), ("mnist", mnist)):
        data[name] = random_data(NETS[name], 20_000, "cuda")
        if arguments.data:
            with attempt(f"reading {name}"):
                read = task.data(arguments.data)
                data[name] = Data(*(getattr(read, part).cuda() for part in Data.__dataclass_fields__))

    for name in NETS:
        for rule in RULES:
            for precision in ("ieee", "tf32x3", "tf32"):
                with attempt(f"check {name} {rule} {precision}"):
                    results["check"][f"{name} {rule} {precision}"] = check(name, precision, rule)
        for rule in ("sgd", "adam", "auto-sgd"):
            with attempt(f"alone {name} {rule}"):
                results["alone"][f"{name} {rule}"] = check_alone(name, rule)
    stamp("checked")

    def measure(variant: str, *args: Any, **options: Any) -> None:
        with attempt(f"{variant} {args[0]} {args[2]} N={args[3]}"):
            row = {"variant": variant, **speed(*args, **options)}
            results["speed"].append(row)
            log(" ".join(f"{key}={value}" for key, value in row.items()))

    for name, net in NETS.items():
        for precision in ("tf32", "ieee"):
            measure(f"triton {precision}", name, data[name], "sgd", 128, fused(net, precision))
        for batch in BATCHES if not arguments.quick else (8, 128):
            for rule in ("sgd", "adam", "auto-sgd", "auto-adam"):
                measure("triton tf32x3", name, data[name], rule, batch, fused(net))
        for runs in (32, 64, 256):
            measure(f"triton tf32x3 K={runs}", name, data[name], "sgd", 128, fused(net), runs=runs)
        measure("torch float32", name, data[name], "sgd", 128, Reference(net), runs=64)
        measure("torch float32", name, data[name], "auto-sgd", 128, Reference(net), runs=64)
        torch.backends.cuda.matmul.allow_tf32 = True
        measure("torch tf32", name, data[name], "sgd", 128, Reference(net), runs=64)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.empty_cache()
    stamp("timed")
    for name, net in NETS.items():
        for batch, moments in ((128, False), (8, False), (128, True)):
            with attempt(f"kernel times {name}"):
                key = f"{name} N={batch} moments={moments}"
                results["kernels"][key] = kernel_times(net, fused(net), runs_for(batch), batch, moments)
        if not arguments.quick:
            results["tuning"][name] = tune(name, 128)
    stamp("kernels timed")
    if arguments.data:
        for name, net in NETS.items():
            with attempt(f"epoch {name}"):
                results["epoch"].append(one_epoch(name, net, data[name]))
    stamp("epochs")
    if not arguments.quick:
        net = NETS["cifar10"]
        for batch, rule in ((8, "sgd"), (8, "adam"), (128, "auto-sgd"), (8, "auto-sgd")):
            if time.perf_counter() - begun < 200:
                measure("triton, fused update", "cifar10", data["cifar10"], rule, batch, fused(net), fuse_update=True)
    stamp("done")
    tables(results)


def one_epoch(name: str, net: Net, data: Data) -> dict[str, Any]:
    """A whole epoch with its evaluation, of 128 runs over rates and momenta."""
    rows = [
        Run(seed, {"lr": lr, "momentum": m}) for lr in (0.1, 0.03, 0.01, 0.3) for m in (0.0, 0.9) for seed in range(16)
    ]
    start = time.perf_counter()
    chunk = Chunk(net, data, Plan("sgd", 128, 1), rows, fused(net), "cuda", torch.float32)
    chunk.order.zero_()
    chunk._go = chunk.captured()
    torch.cuda.synchronize()
    ready = time.perf_counter()
    chunk.epoch(0)
    torch.cuda.synchronize()
    end = time.perf_counter()
    errors = [result.test_error[0] for result in chunk.results()]
    best = [sum(errors[i : i + 16]) / 16 for i in range(0, len(errors), 16)]
    return {"net": name, "setup_s": ready - start, "epoch_s": end - ready, "mean_test_error": best}


def tables(results: dict[str, Any]) -> None:
    log("\nfused GPU against CPU float64 after 6 steps (relative to the largest change)")
    for key, value in results["check"].items():
        log(f"  {key:32} {value:.1e}")
    log("the same bits alone and in company:", results["alone"])
    log("\nmicroseconds per kernel launch, 16384 samples (N=8: 8192)")
    for key, times in results["kernels"].items():
        log(f" {key}: total {sum(times.values()) * 1e3:.0f}")
        for label, ms in times.items():
            log(f"   {label:40} {ms * 1e3:8.1f}")
    for name, table in results["tuning"].items():
        log(f"\nfaster launches than the default, {name}")
        for label, launches in table.items():
            best = sorted(launches.items(), key=lambda item: item[1])[:3]
            log(f"   {label:40} default {launches.get('default')}: {best}")
    log("\nepochs", json.dumps(results["epoch"]))
    log("\nmillion training samples per second")
    for row in results["speed"]:
        what = f"{row['variant']:24} {row['net']:8} {row['rule']:10} N={row['batch']:<4} K={row['runs']:<5}"
        rate = row["samples_per_s"] / 1e6
        log(f"  {what}{rate:7.3f} M/s {row['ms']:8.3f} ms {row['tflops']:7.2f} TFLOP/s {row['gib']:6.2f} GiB")


if __name__ == "__main__":
    main()
