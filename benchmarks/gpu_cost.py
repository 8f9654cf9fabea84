"""What a training step costs on a GPU over torch.optim's fused one: ResNet-18, GPT-2 124M and ViT-B/16, in bfloat16.

    PYTHONPATH=src python3 benchmarks/gpu_cost.py --out FILE [--only resnet18] [--profile] [--device cpu --small]

Needs torch, transformers and a CUDA device. In one process: the plain optimizer, ours, the plain one again, 32 steps
each after 18; the time of a step is the median over steps, memory the peak. "eager" is the loop as people write it,
"compiled" the same with torch.compile(model), once more as a graph, and "graph" the whole step (forward, backward and
step()) as one CUDA graph, in which the host costs nothing; "recorded" is that graph as autoopt.recorded() makes it,
which copies the batch and the loss, with a mean too; memory of both is what they hold when nothing runs. "every 16" is
measure_every=16, of which a mean is taken too.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_check import give_up_recording, resnet18
from torch import nn

from autoopt import AutoAdam, AutoSGD, recorded
from autoopt.moments import operation, product

Batch = tuple[torch.Tensor, ...]
Subject = tuple[nn.Module, Callable[..., torch.Tensor], Batch]  # a model, its loss of a batch, and the batch
WARM, TIMED = 18, 32  # the first 16 steps of "every 16" all measure


def resnet(device: str, small: bool) -> Subject:
    """For images of 32 x 32, 128 of them, channels last."""
    samples = 8 if small else 128
    model = resnet18().to(device).to(memory_format=torch.channels_last)
    x = torch.randn(samples, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (samples,), device=device)
    return model, lambda x, y: F.cross_entropy(model(x), y), (x, y)


def gpt2(device: str, small: bool) -> Subject:
    """124M parameters, 8 x 1024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500} if small else {}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)).to(device).train()
    tokens = torch.randint(0, model.config.vocab_size, (8, 32 if small else 1024), device=device)
    return model, lambda tokens: model(tokens, labels=tokens).loss, (tokens,)


def vit(device: str, small: bool) -> Subject:
    """ViT-B/16, 64 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "image_size": 32} if small else {}
    model = ViTForImageClassification(ViTConfig(**sizes, num_labels=1000)).to(device).train()
    side, samples = model.config.image_size, 4 if small else 64
    x = torch.randn(samples, 3, side, side, device=device)
    y = torch.randint(0, 1000, (samples,), device=device)
    return model, lambda x, y: F.cross_entropy(model(pixel_values=x).logits, y), (x, y)


SUBJECTS = {"resnet18": resnet, "gpt2": gpt2, "vit-b16": vit}
PLAIN: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4, fused=True, capturable=True),
}
OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": AutoSGD, "Adam": AutoAdam}


class Loop:
    """One model under one optimizer."""

    def __init__(self, subject: Callable[[str, bool], Subject], make: Any, device: str, small: bool) -> None:
        torch.manual_seed(0)
        self.device, self.cuda = device, device == "cuda"
        torch.compiler.reset()
        if self.cuda:
            torch.cuda.synchronize()
            self.before = torch.cuda.memory_allocated()  # what earlier runs left
        self.model, self.loss, self.batch = subject(device, small)
        self.optimizer = make(self.model)

    def train(self, *batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def step(self) -> None:
        self.train(*self.batch)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def times(self, go: Callable[[], object], count: int = TIMED) -> list[float]:
        """Milliseconds of each step, none waiting for the one before."""
        if not self.cuda:
            marks = [time.perf_counter() * 1e3]
            for _ in range(count):
                go()
                marks.append(time.perf_counter() * 1e3)
            return [b - a for a, b in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            go()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def eager(self) -> dict[str, float]:
        for _ in range(WARM):
            self.step()
        self.sync()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times = self.times(self.step)
        found = {"ms": statistics.median(times), "mean ms": statistics.mean(times)}
        if self.cuda:
            found["MiB"] = (torch.cuda.max_memory_allocated() - self.before) / 2**20
            found["syncs"] = self.synchronisations()
        return {**found, "host ms": self.host(self.step)}

    def host(self, go: Callable[[], object]) -> float:
        """Milliseconds that a step takes of the host."""
        self.sync()
        start = time.perf_counter()
        for _ in range(3):
            go()
        found = (time.perf_counter() - start) / 3 * 1e3
        self.sync()
        return found

    def synchronisations(self) -> int:
        """Of forward, backward and step. (The mask of transformers' GPT-2 needs some, whatever the optimizer.)"""
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    def compiled(self) -> dict[str, float]:
        """With torch.compile of the model, after what it takes to compile; the same as one CUDA graph."""
        start = time.perf_counter()
        self.model.compile()
        for _ in range(WARM):
            self.step()
        self.sync()
        took = time.perf_counter() - start
        found = {"ms": statistics.median(self.times(self.step)), "host ms": self.host(self.step), "compiling s": took}
        stream = torch.cuda.current_stream()
        try:
            found["graph ms"] = self.graph()["ms"]
        except Exception:  # what is compiled anew while a graph is recorded spoils it
            traceback.print_exc(limit=-6)
            give_up_recording(stream)
        return found

    def graph(self) -> dict[str, float]:
        """The whole step as one CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for _ in range(5):
            graph.replay()
        return {"ms": statistics.median(self.times(graph.replay)), "held MiB": self.held()}

    def held(self) -> float:
        """MiB of model, optimizer and all that graphs keep for themselves, when nothing runs."""
        self.sync()
        free()
        segments = torch.cuda.memory_snapshot()
        sizes = (s["allocated_size" if s["segment_pool_id"] == (0, 0) else "total_size"] for s in segments)
        return (sum(sizes) - self.before) / 2**20

    def recorded(self) -> dict[str, float]:
        """The step through autoopt.recorded()."""
        step = functools.partial(recorded(self.train, self.optimizer), *self.batch)
        for _ in range(8):
            step()
        times = self.times(step)
        found = {"ms": statistics.median(times), "mean ms": statistics.mean(times)}
        return {**found, "host ms": self.host(step), "held MiB": self.held()}

    def profile(self) -> str:
        """Where the time goes: kernels, then the host."""
        import cProfile
        import io
        import pstats

        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as found:
            self.step()
            self.sync()
        by = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        text = found.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=70)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(5):
            self.step()
        profiler.disable()
        self.sync()
        out = io.StringIO()
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(30)
        return text + out.getvalue()


def without_mask() -> contextlib.AbstractContextManager[Any]:
    """Keeps transformers 5.17 from making a mask for the ViT while a graph is recorded.

    It masks nothing, but attention does without its fast kernels then: of any optimizer, the step takes twice as long.
    (GPT-2 gets a mask, too, and cannot do without: to see that it masks nothing the host would read the device.)
    """
    from transformers.utils import import_utils

    return mock.patch.object(import_utils, "is_cuda_stream_capturing", return_value=False, create=True)


def triton(on: bool) -> None:
    """Whether the rules may take their Triton kernels."""
    operation.TRITON = product.TRITON = on


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rounded(found: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in found.items()}


def measure(name: str, options: argparse.Namespace, texts: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind in PLAIN:
        variants: list[tuple[str, Any, bool]] = [("plain", PLAIN[kind], False), ("auto", OURS[kind], False)]
        if options.triton:
            variants.append(("auto triton", OURS[kind], True))
        variants.append(("auto every 16", functools.partial(OURS[kind], measure_every=16), False))
        variants.append(("plain again", PLAIN[kind], False))
        for variant, make, kernels in variants:
            triton(kernels)
            row: dict[str, Any] = {"model": name, "optimizer": kind, "variant": variant}
            loop = None
            try:
                loop = Loop(SUBJECTS[name], make, options.device, options.small)
                row["eager"] = rounded(loop.eager())
                if options.profile and variant.startswith("auto"):
                    texts.append(f"=== {name} {kind} {variant}\n{loop.profile()}")
                if loop.cuda and variant in ("plain", "auto", "auto triton"):
                    with without_mask() if name == "vit-b16" else contextlib.nullcontext():
                        row["graph"] = rounded(loop.graph())
                        if variant != "plain":
                            row["recorded"] = rounded(loop.recorded())
                if kind == "SGD" and name in options.compile and variant in ("plain", "auto"):
                    row["compiled"] = rounded(loop.compiled())
            except Exception as error:  # the other rows are worth having
                traceback.print_exc(limit=-6)
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            del loop
            free()
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Measure, and write after every model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", choices=SUBJECTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script on a CPU")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--compile", action="append", default=[], choices=SUBJECTS, help="a compiled model too, with SGD"
    )
    parser.add_argument("--triton", action="store_true", help="also with the Triton kernels")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {"torch": torch.__version__, "device": name, "rows": []}
    texts: list[str] = []
    for subject in options.only or SUBJECTS:
        found["rows"] += measure(subject, options, texts)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
            if texts:
                options.out.with_suffix(".profile.txt").write_text("\n".join(texts))
    table(found["rows"])


def table(rows: list[dict[str, Any]]) -> None:
    """Ratios over the mean of the two plain runs."""
    for row in rows:
        if not row["variant"].startswith("auto") or "eager" not in row:
            continue
        plain = [r for r in rows if r["variant"].startswith("plain") and r["model"] == row["model"]]
        plain = [r for r in plain if r["optimizer"] == row["optimizer"] and "eager" in r]
        ms = statistics.mean(r["eager"]["ms"] for r in plain)
        line = f"{row['model']:10} {row['optimizer']:5} {row['variant']:12}"
        line += f" eager {row['eager']['ms'] / ms:6.3f} of {ms:.2f} ms"
        if "MiB" in row["eager"]:
            line += f", memory {row['eager']['MiB'] / statistics.mean(r['eager']['MiB'] for r in plain):.3f}"
            line += f", syncs {row['eager']['syncs'] - plain[0]['eager']['syncs']:+.0f}"
        for way, over in (("graph", "graph"), ("recorded", "graph"), ("compiled", "compiled")):
            if way in row and over in plain[0]:
                line += f", {way} {row[way]['ms'] / plain[0][over]['ms']:6.3f} of {plain[0][over]['ms']:.2f} ms"
                if "graph ms" in row[way] and "graph ms" in plain[0][over]:
                    alone = plain[0][over]["graph ms"]
                    line += f" (as a graph {row[way]['graph ms'] / alone:6.3f} of {alone:.2f} ms)"
                if "held MiB" in row[way]:
                    line += f" (memory {row[way]['held MiB'] / plain[0][over]['held MiB']:.3f})"
        line += f", mean {row['eager']['mean ms'] / statistics.mean(r['eager']['mean ms'] for r in plain):.3f}"
        print(line)


if __name__ == "__main__":
    main()
