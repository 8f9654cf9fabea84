"""The layer rules on a GPU: every path against float64 on the CPU, and what each costs over the plain weight gradient.

    PYTHONPATH=src python3 benchmarks/moments_gpu.py [--out FILE] [--seconds 80]

Needs torch with CUDA, nothing else (Triton where there is one). The shapes are those of ResNet-18 (CIFAR size, 128
images, channels last), GPT-2 (8 x 1024 tokens) and ViT-B/16 (64 images), in bfloat16. A variant that fails is reported
and left out. Kernels are compiled beforehand by several processes; what does not fit into --seconds is left out.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.capture import Capture
from autoopt.moments import linear, norm, product
from autoopt.moments.conv import Conv
from autoopt.moments.operation import TRITON, Moments, moments

HALF = torch.bfloat16
Run = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A weight gradient: a convolution where it has a kernel, else a sequence of positions."""

    name: str
    samples: int
    inputs: int
    outputs: int
    size: int  # side of the input image, or positions
    kernel: int = 0
    stride: int = 1

    def conv(self) -> Conv:
        return Conv((self.kernel,) * 2, (self.stride,) * 2, (self.kernel // 2,) * 2, (1, 1), 1)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """dy and x."""
        torch.manual_seed(0)
        if not self.kernel:
            sizes = (self.samples, self.size)
            x, dy = (torch.randn(*sizes, width, device="cuda", dtype=HALF) for width in (self.inputs, self.outputs))
            return dy, x
        side = (self.size - 1) // self.stride + 1
        x = torch.randn(self.samples, self.inputs, self.size, self.size, device="cuda", dtype=HALF)
        dy = torch.randn(self.samples, self.outputs, side, side, device="cuda", dtype=HALF)
        return dy.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


SHAPES = [
    Shape("3-64 3x3 @32", 128, 3, 64, 32, 3),
    Shape("64-64 3x3 @32", 128, 64, 64, 32, 3),
    Shape("64-128 3x3 /2 @32", 128, 64, 128, 32, 3, 2),
    Shape("64-128 1x1 /2 @32", 128, 64, 128, 32, 1, 2),
    Shape("128-128 3x3 @16", 128, 128, 128, 16, 3),
    Shape("128-256 3x3 /2 @16", 128, 128, 256, 16, 3, 2),
    Shape("256-256 3x3 @8", 128, 256, 256, 8, 3),
    Shape("256-512 3x3 /2 @8", 128, 256, 512, 8, 3, 2),
    Shape("256-512 1x1 /2 @8", 128, 256, 512, 8, 1, 2),
    Shape("512-512 3x3 @4", 128, 512, 512, 4, 3),
    Shape("GPT-2 768-768", 8, 768, 768, 1024),
    Shape("GPT-2 768-2304", 8, 768, 2304, 1024),
    Shape("GPT-2 768-3072", 8, 768, 3072, 1024),
    Shape("GPT-2 3072-768", 8, 3072, 768, 1024),
    Shape("ViT-B 768-768", 64, 768, 768, 197),
    Shape("ViT-B 768-2304", 64, 768, 2304, 197),
    Shape("ViT-B 768-3072", 64, 768, 3072, 197),
]

LONG_BLOCKS = [(128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (64, 256, 64, 8, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 4)]
SHORT_BLOCKS = [(128, 128, 16, 8, 4), (128, 64, 16, 4, 4), (64, 64, 16, 4, 4), (64, 64, 16, 4, 6), (64, 32, 16, 4, 4)]


def blocks(shape: Shape) -> list[tuple[int, ...]]:
    """Tiles worth a try."""
    positions = (shape.size // shape.stride) ** 2 if shape.kernel else shape.size
    tried = SHORT_BLOCKS if positions <= 16 else LONG_BLOCKS
    return [block for block in tried if block[0] <= shape.outputs and block[1] <= max(64, shape.inputs)]


def gram_rule(dy: Tensor, x: Tensor, conv: Conv | None) -> Moments:
    """The Gram form, whatever the rule says."""
    kept, product.BALANCE = product.BALANCE, 1 << 60
    try:
        if conv is None:
            return linear.sequence_moments(dy, x, True)
        return conv.weight_moments(dy, (x,), True)
    finally:
        product.BALANCE = kept


def variants(shape: Shape, dy: Tensor, x: Tensor) -> dict[str, Run]:
    """Name -> what to run. "elem" gives Σ c_i² for each element, "total" its sum, both with the gradient."""
    conv = shape.conv() if shape.kernel else None
    runs: dict[str, Run] = {}
    if conv is not None:
        weight = x.new_empty(shape.outputs, shape.inputs, *conv.kernel).to(memory_format=torch.channels_last)
        runs["plain"] = lambda: conv._backward(dy, x, weight, (False, True, False))[1]
        runs["rule elem"] = lambda: conv.weight_moments(dy, (x,), False)
        runs["rule total"] = lambda: conv.weight_moments(dy, (x,), True)
        runs["bmm elem"] = lambda: conv._one_by_one(dy, x, tuple(weight.shape), False)
    else:
        runs["plain"] = lambda: dy.flatten(0, 1).T @ x.flatten(0, 1)
        runs["rule elem"] = lambda: linear.sequence_moments(dy, x, False)
        runs["rule total"] = lambda: linear.sequence_moments(dy, x, True)
        runs["bmm elem"] = lambda: product.product_moments(dy, x, False)
        runs["bmm total"] = lambda: product.product_moments(dy, x, True)
        runs["bmm torch elem"] = lambda: moments(product.product(dy.mT, x), False)
    if shape.size <= (16 if shape.kernel else 256):
        runs["gram total"] = lambda: gram_rule(dy, x, conv)
    if not TRITON:
        return runs
    from autoopt.moments import triton

    images = (dy, x) if conv is not None else (dy.mT.unsqueeze(2), x.mT.unsqueeze(2))
    sizes = (conv.kernel, conv.stride, conv.padding, conv.dilation) if conv is not None else ((1, 1),)

    def tiles(total: bool, block: tuple[int, ...] | None = None) -> Run:
        return lambda: triton.weight_moments(*images, total, *sizes, block=block)

    if conv is None:
        runs["bmm16 elem"] = lambda: triton.reduce(dy.mT @ x, False)
        runs["bmm16 total"] = lambda: triton.reduce(dy.mT @ x, True)
    elif shape.inputs < 16:
        flat = dy.flatten(2).unsqueeze(2)
        runs["columns elem"] = lambda: triton.weight_moments(flat, conv.columns(x).transpose(1, 2), False)
    runs["tiles elem"], runs["tiles total"] = tiles(False), tiles(True)
    for block in blocks(shape):
        runs[f"tiles elem {block}"] = tiles(False, block)
    return runs


def compile_ahead(index: int) -> None:
    """Run every variant of a shape once, in a process of its own: its kernels are then in Triton's cache on disk."""
    shape = SHAPES[index]
    for run in variants(shape, *shape.tensors()).values():
        try:
            run()
        except Exception:  # reported where it is timed
            continue
    torch.cuda.synchronize()


def milliseconds(run: Run, flush: Tensor, repeats: int = 15) -> float:
    """Median over repeats, each with a cold cache."""
    for _ in range(3):
        run()
    events = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_microseconds(run: Run) -> float:
    """What a call costs the Python thread, when the GPU does not hold it up."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        run()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / 20 * 1e6


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours.cpu().double().reshape(exact.shape) - exact).abs().max() / exact.abs().max()).item()


def check_products() -> dict[str, list[float]]:
    """Largest relative error of gradient and Σ c_i² of small relatives of the shapes, variant by variant."""
    small = [
        Shape("conv", 6, 24, 40, 9, 3), Shape("conv /2", 6, 24, 40, 9, 3, 2), Shape("1x1", 6, 24, 40, 8, 1),
        Shape("1x1 /2", 6, 24, 40, 9, 1, 2), Shape("few inputs", 6, 3, 20, 9, 3), Shape("4x4", 9, 160, 144, 4, 3),
        Shape("sequence", 5, 24, 40, 70), Shape("short", 9, 160, 144, 3), Shape("long", 3, 72, 136, 600),
    ]  # fmt: skip
    found: dict[str, list[float]] = {}
    for shape in small:
        dy, x = shape.tensors()
        d64, x64 = dy.cpu().double(), x.cpu().double()
        if shape.kernel:
            exact = {total: shape.conv().weight_moments(d64, (x64,), total) for total in (False, True)}
        else:
            exact = {total: linear.sequence_moments(d64, x64, total) for total in (False, True)}
        for name, run in variants(shape, dy, x).items():
            if name == "plain" or "(" in name:
                continue
            try:
                gradient, square = run()
                errors = [relative(gradient, exact[False].gradient), relative(square, exact["total" in name].square)]
                limits = (0.02, 0.02 if "16" in name else 2e-3)  # a gradient is rounded to bfloat16, a square is not
                failed = any(not error < limit for error, limit in zip(errors, limits, strict=True))
                found[f"{shape.name}: {name}{' WRONG' if failed else ''}"] = [float(f"{e:.1e}") for e in errors]
            except Exception as error:
                found[f"{shape.name}: {name} FAILED {type(error).__name__} {str(error)[:200]}"] = []
    return found


def every_layer() -> nn.Module:
    """A small network with each rule that has a kernel."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, 2, bias=False), nn.GroupNorm(4, 32), nn.Flatten(2), nn.Linear(49, 64), nn.LayerNorm(64),
        nn.GELU(), nn.Conv1d(32, 16, 3), nn.RMSNorm(62, eps=1e-6), nn.Conv1d(16, 16, 3, groups=4), nn.Flatten(),
        nn.Linear(960, 10),
    )  # fmt: skip


def check_model(elementwise: bool, compiled: bool) -> list[float]:
    """Largest relative error of gradient and Σ c_i² of a network under autocast, without a synchronisation."""
    torch.manual_seed(0)
    slow, x, y = every_layer().double(), torch.randn(32, 3, 16, 16).double(), torch.randint(0, 10, (32,))
    fast = every_layer().cuda()
    fast.load_state_dict(slow.state_dict())
    captures = [Capture(model, dict(model.named_parameters()), elementwise=elementwise) for model in (slow, fast)]
    F.cross_entropy(slow(x), y).backward()
    image, label = x.float().cuda().to(memory_format=torch.channels_last), y.cuda()
    model: Any = torch.compile(fast, fullgraph=True, backend="aot_eager") if compiled else fast
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default" if compiled else "error")
    try:
        with torch.autocast("cuda", HALF):
            loss = F.cross_entropy(model(image), label)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    worst = [0.0, 0.0]
    for name, parameter in slow.named_parameters():
        pairs = (parameter.grad, fast.get_parameter(name).grad), [c.second_moment(name) for c in captures]
        for k, (exact, ours) in enumerate(pairs):
            assert exact is not None
            assert ours is not None
            worst[k] = max(worst[k], relative(ours, exact))
    return [float(f"{error:.1e}") for error in worst]


def norms(flush: Tensor) -> dict[str, list[float]]:
    """Milliseconds of a normalisation's whole backward: plain, with moments fused, with moments unfused."""
    found = {}
    for name, channels, side in (("BatchNorm 64 @32", 64, 32), ("BatchNorm 512 @4", 512, 4)):
        x = torch.randn(128, channels, side, side, device="cuda", dtype=HALF).to(memory_format=torch.channels_last)
        weight, dy = torch.ones(channels, device="cuda"), torch.randn_like(x)
        batch = norm.BatchNorm(None, None, True, 0.1, 1e-5)
        kept = batch.forward(x, weight, weight)[1]
        backward, every = torch.ops.aten.native_batch_norm_backward, (True, True, True)
        plain = lambda: backward(dy, x, weight, None, None, *kept[1:], True, 1e-5, every)  # noqa: B023, E731
        found[name] = norm_times(batch, dy, kept, weight, plain, flush)
    for name, dtype in (("LayerNorm 8 x 1024 x 768", HALF), ("the same in float32", torch.float32)):
        x = torch.randn(8, 1024, 768, device="cuda", dtype=dtype)
        weight, dy = torch.ones(768, device="cuda", dtype=dtype), torch.randn_like(x)
        layer = norm.LayerNorm((768,), 1e-5)
        kept = layer.forward(x, weight, weight)[1]
        backward = torch.ops.aten.native_layer_norm_backward
        plain = lambda: backward(dy, x, (768,), *kept[1:], weight, weight, (True, True, True))  # noqa: B023, E731
        found[name] = norm_times(layer, dy, kept, weight, plain, flush)
    return found


def norm_times(rule: Any, dy: Tensor, kept: Any, weight: Tensor, plain: Run, flush: Tensor) -> list[float]:
    """Plain, then fused and unfused."""

    def ours() -> None:
        rule.input_gradient(dy, kept, weight)
        rule.weight_moments(dy, kept, False)
        rule.bias_moments(dy, False)

    times = [milliseconds(plain, flush), milliseconds(ours, flush)]
    fused, norm.fused = norm.fused, lambda _: False  # type: ignore[attr-defined]
    times.append(milliseconds(ours, flush))
    norm.fused = fused  # type: ignore[attr-defined]
    return [round(t, 4) for t in times]


def attempt(run: Callable[[], Any]) -> Any:
    """The result, or what went wrong."""
    try:
        return run()
    except Exception as error:  # one broken path must not hide the others
        traceback.print_exc(limit=-3)
        return f"FAILED {type(error).__name__}: {str(error)[:300]}"


def main() -> None:
    """Check, time, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=80)
    options = parser.parse_args()
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(8, mp_context=context)
    jobs = [pool.submit(compile_ahead, index) for index in range(len(SHAPES))]
    concurrent.futures.wait(jobs, timeout=0.6 * options.seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    found: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    found["compiled ahead in s"] = round(time.perf_counter() - began, 1)

    found["errors"] = check_products()
    for compiled in (False, True):
        for elementwise in (True, False):
            name = f"model{' compiled' if compiled else ''}, {'elementwise' if elementwise else 'total'}"
            found["errors"][name] = attempt(lambda e=elementwise, c=compiled: check_model(e, c))
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    found["norms: ms plain, fused, unfused"] = attempt(lambda: norms(flush))
    times: dict[str, dict[str, Any]] = {}
    host: dict[str, dict[str, Any]] = {}
    for shape in SHAPES:
        runs = variants(shape, *shape.tensors())
        times[shape.name], host[shape.name] = {}, {}
        for name, run in runs.items():
            if time.perf_counter() - began > options.seconds:
                break
            times[shape.name][name] = attempt(lambda run=run: round(milliseconds(run, flush), 4))
            if "(" not in name:
                host[shape.name][name] = attempt(lambda run=run: round(host_microseconds(run), 1))
    found["ms"], found["host µs"] = times, host
    found["seconds"] = round(time.perf_counter() - began, 1)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    report(found)


def report(found: dict[str, Any]) -> None:
    """The short table, last."""
    for key, value in found["errors"].items():
        if not isinstance(value, list) or "FAILED" in key or "WRONG" in key or key.startswith("model"):
            print(f"{key}: {value}")
    errors = [value for value in found["errors"].values() if value and isinstance(value, list)]
    print("largest error, gradient and square:", [max(value[k] for value in errors) for k in (0, 1)])
    print("norms, ms plain / fused / unfused:", found["norms: ms plain, fused, unfused"])
    names = [
        "rule elem",
        "rule total",
        "tiles elem",
        "tiles total",
        "gram total",
        "bmm elem",
        "bmm16 elem",
        "best block",
    ]
    print(f"{'over the plain weight gradient':30} {'plain ms':>9} " + " ".join(f"{name:>11}" for name in names))
    for shape, times in found["ms"].items():
        plain = times.get("plain")
        if not isinstance(plain, float):
            print(f"{shape:30} {plain}")
            continue
        tried = {name: t for name, t in times.items() if "(" in name and isinstance(t, float)}
        best = min(tried, key=tried.__getitem__, default="")
        cells = [times.get(name) for name in names[:-1]] + [tried.get(best)]
        text = " ".join(f"{t / plain:11.2f}" if isinstance(t, float) else f"{'-':>11}" for t in cells)
        print(f"{shape:30} {plain:9.4f} {text} {best.replace('tiles elem ', '')}")
    some = ("64-64 3x3 @32", "512-512 3x3 @4", "ViT-B 768-768")
    print("host µs of a call:", {name: found["host µs"].get(name) for name in some})
    print(f"{found['gpu']}, torch {found['torch']}, {found['seconds']} s")


if __name__ == "__main__":
    main()
