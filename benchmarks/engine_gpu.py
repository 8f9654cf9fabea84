"""Checks and times the vectorised engine on one GPU, in less than four minutes.

    python3 benchmarks/engine_gpu.py --out DIR [--data DIR] [--quick]

Needs torch, Triton and numpy alone. Writes DIR/engine_gpu.json; the tables are printed last. With --data it takes the
real images and measures what the precision of the products does to test errors. --quick leaves out the tuning and
the compiled update. Exits with 1 if a promise does not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engine_bounds import multiply_adds, shares
from engine_cases import BATCHES, NETS, TASKS, attempt, fused, log, make, milliseconds, random_data, runs_for
from engine_checks import PRECISIONS, against_float64, alone, at_once, effect_of_precision, sampled
from engine_tune import ALTERNATIVES, CASES, kernel_times, set_launches, tune
from engine_tune import table as kernel_table

from autoopt_lab.engine import RULES, Plan, Run
from autoopt_lab.engine.reference import Reference
from autoopt_lab.engine.train import Backend, Chunk
from autoopt_lab.tasks import Data

Job = tuple[str, int, str, bool, int | None]  # net, batch, precision, second moments, which launch of engine_tune
TIMED_RULES = ("sgd", "adam", "auto-sgd", "auto-adam")
ENOUGH = 205  # seconds after which nothing optional is begun


def build(job: Job) -> float:
    """Compiles the kernels of one configuration into Triton's cache on disk (in a worker process)."""
    name, batch, precision, moments, launch = job
    start = time.perf_counter()
    try:
        torch.set_num_threads(1)
        net = NETS[name]
        backend = fused(net, precision)
        set_launches(backend, launch)
        kernel_times(net, backend, 2, batch, moments, repeats=0)
        if launch is None and not moments and batch == 128:  # the kernels of an evaluation
            channels, height, width = net.image
            backend.logits(
                net.initial(0).repeat(2, 1).cuda(), torch.randn(1000, height, width, channels, device="cuda")
            )
            torch.cuda.synchronize()
    except Exception as error:
        log(f"build {job}: {type(error).__name__}: {str(error)[:300]}")
    return time.perf_counter() - start


def build_all(quick: bool) -> None:
    jobs: list[Job] = []
    for name in NETS:
        jobs += [(name, batch, "tf32x3", moments, None) for batch in BATCHES for moments in (False, True)]
        jobs += [(name, batch, p, m, None) for batch in (16, 128) for p in ("ieee", "tf32") for m in (False, True)]
        if not quick:
            jobs += [(name, batch, "tf32x3", m, i) for batch, m in CASES for i in range(ALTERNATIVES)]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        spent = pool.map(build, jobs, chunksize=1)
    log(f"built {len(jobs)} configurations in {time.perf_counter() - start:.0f} s ({sum(spent):.0f} s of work)")


def speed(
    name: str, data: Data, rule: str, batch: int, backend: Backend, runs: int | None = None, **options: Any
) -> dict[str, Any]:
    runs = runs or runs_for(batch)
    torch.cuda.empty_cache()
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


class Session:
    """The results so far, saved after every part."""

    def __init__(self, out: Path, folder: Path | None, quick: bool) -> None:
        self.out, self.folder, self.quick, self.begun = out, folder, quick, time.perf_counter()
        self.results: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            **{part: {} for part in ("check", "alone", "at_once", "sampled", "kernels", "tuning")},
            **{part: [] for part in ("speed", "epoch", "precision")},
        }
        self.data: dict[str, Data] = {}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def stamp(self, what: str) -> None:
        (self.out / "engine_gpu.json").write_text(json.dumps(self.results, indent=1))
        log(f"[{self.seconds:5.0f} s] {what}")

    def read(self) -> None:
        for name, task in TASKS.items():
            self.data[name] = random_data(NETS[name], 20_000, "cuda")
            if self.folder:
                with attempt(f"reading {name}"):
                    read = task.data(self.folder)
                    self.data[name] = Data(*(getattr(read, part).cuda() for part in Data.__dataclass_fields__))

    def check(self) -> None:
        for name in NETS:
            for rule in RULES:
                for precision in PRECISIONS:
                    with attempt(f"check {name} {rule} {precision}"):
                        key = f"{name} {rule} {precision}"
                        self.results["check"][key] = against_float64(name, precision, rule)
            for rule in ("sgd", "adam", "paper-sgd", "auto-sgd"):
                with attempt(f"alone {name} {rule}"):
                    self.results["alone"][f"{name} {rule}"] = alone(name, rule)
        self.stamp("checked against float64")
        with attempt("chunks at once"):
            self.results["at_once"] = at_once()
        with attempt("sampled settings"):
            self.results["sampled"] = sampled()
            log(json.dumps(self.results["sampled"]))

    def measure(self, variant: str, name: str, rule: str, batch: int, backend: Backend, **options: Any) -> None:
        with attempt(f"{variant} {name} {rule} N={batch}"):
            row = {"variant": variant, **speed(name, self.data[name], rule, batch, backend, **options)}
            self.results["speed"].append(row)
            log(" ".join(f"{key}={value}" for key, value in row.items()))

    def time(self) -> None:
        for name, net in NETS.items():
            for precision in ("tf32", "ieee"):
                self.measure(f"triton {precision}", name, "sgd", 128, fused(net, precision))
            for batch in BATCHES:
                for rule in TIMED_RULES:
                    self.measure("triton tf32x3", name, rule, batch, fused(net))
            for runs in (32, 64, 256):
                self.measure(f"triton tf32x3 K={runs}", name, "sgd", 128, fused(net), runs=runs)
            for rule in ("sgd", "paper-sgd"):
                self.measure("torch float32", name, rule, 128, Reference(net), runs=64)
            torch.backends.cuda.matmul.allow_tf32 = True
            self.measure("torch tf32", name, "sgd", 128, Reference(net), runs=64)
            torch.backends.cuda.matmul.allow_tf32 = False

    def time_kernels(self) -> None:
        for name, net in NETS.items():
            for batch, moments in CASES:
                key = f"{name} N={batch} moments={moments}"
                with attempt(f"kernel times {key}"):
                    self.results["kernels"][key] = kernel_times(net, fused(net), runs_for(batch), batch, moments)
                if not self.quick:
                    self.results["tuning"][key] = tune(name, batch, moments)

    def train(self) -> None:
        for name in NETS:
            with attempt(f"epoch {name}"):
                self.results["epoch"].append(one_epoch(name, self.data[name]))
            for rule in ("sgd", "adam", "auto-sgd"):
                with attempt(f"effect of precision {name} {rule}"):
                    self.results["precision"].append(effect_of_precision(name, self.data[name], rule))

    def compile_update(self) -> None:
        """torch.compile takes some seconds for each rule, and again for a run alone."""
        for rule in ("adam", "auto-adam"):
            if self.seconds < ENOUGH:
                with attempt(f"compiled update alone {rule}"):
                    self.results["alone"][f"cifar10 {rule} compiled"] = alone("cifar10", rule, compile_update=True)
        for batch in (128, 8, 32, 256, 16, 64):
            for rule in TIMED_RULES:
                if self.seconds < ENOUGH:
                    backend = fused(NETS["cifar10"])
                    self.measure("triton tf32x3 compiled", "cifar10", rule, batch, backend, compile_update=True)

    def broken(self) -> list[str]:
        checks = ("alone", "at_once")
        promises = [f"{part}: {key}" for part in checks for key, kept in self.results[part].items() if not kept]
        return promises + ([] if self.results["sampled"].get("passed") else ["256 sampled settings"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    session = Session(arguments.out, arguments.data, arguments.quick)
    with attempt("building in parallel"):
        build_all(arguments.quick)
    session.read()
    session.stamp("built")
    session.check()
    session.stamp("checked")
    session.time()
    session.stamp("timed")
    session.time_kernels()
    session.stamp("kernels timed")
    if arguments.data:
        session.train()
        session.stamp("epochs")
    if not arguments.quick:
        session.compile_update()
    session.stamp("done")
    tables(session.results)
    if broken := session.broken():
        sys.exit(f"promises that do not hold: {', '.join(broken)}")


def one_epoch(name: str, data: Data) -> dict[str, Any]:
    """A whole epoch with its evaluation, of 128 runs over rates and momenta."""
    rows = [
        Run(seed, {"lr": lr, "momentum": m}) for lr in (0.1, 0.03, 0.01, 0.3) for m in (0.0, 0.9) for seed in range(16)
    ]
    start = time.perf_counter()
    chunk = Chunk(NETS[name], data, Plan("sgd", 128, 1), rows, fused(NETS[name]), "cuda", torch.float32)
    chunk._go = chunk.captured()
    torch.cuda.synchronize()
    ready = time.perf_counter()
    chunk.epoch(0)
    torch.cuda.synchronize()
    end = time.perf_counter()
    errors = [result.test_error[0] for result in chunk.results()]
    means = [sum(errors[i : i + 16]) / 16 for i in range(0, len(errors), 16)]
    return {"net": name, "setup_s": ready - start, "epoch_s": end - ready, "mean_test_error": means}


def tables(results: dict[str, Any]) -> None:
    log("\nfused GPU against CPU float64 after 6 steps (relative to the largest change)")
    for key, value in results["check"].items():
        log(f"  {key:32} {value:.1e}")
    log("the same bits alone and in company:", results["alone"])
    log("the same bits with other chunks at once:", results["at_once"])
    log("sampled settings, alone against in company:", results["sampled"])
    kernel_table(results)
    log("\nepochs", json.dumps(results["epoch"]))
    log("\ntest error after one epoch, per cent, mean and standard deviation")
    for row in results["precision"]:
        log(f"  {row['net']:8} {row['rule']:10} " + "  ".join(f"{p} {row[p][0]} ({row[p][1]})" for p in PRECISIONS))
    log("\nmillion training samples per second, shares of the arithmetic and memory bound")
    for row in results["speed"]:
        what = f"{row['variant']:24} {row['net']:8} {row['rule']:10} N={row['batch']:<4} K={row['runs']:<5}"
        of = "{:5.1f} % {:5.1f} %".format(*shares(row)) if row["variant"].startswith("triton tf32x3") else ""
        log(f"  {what}{row['samples_per_s'] / 1e6:7.3f} M/s {row['ms']:8.3f} ms {row['gib']:6.2f} GiB {of}")


if __name__ == "__main__":
    main()
