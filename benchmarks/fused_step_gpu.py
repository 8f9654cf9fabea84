"""The step by kernels against the step by operations, on a GPU: whether they agree, and what they cost.

    PYTHONPATH=src python3 benchmarks/fused_step_gpu.py --out FILE [--small]

Needs torch with Triton and a CUDA device, and takes less than a minute. First 20 steps of a net with odd sizes by both
paths: the largest difference of any weight or state, relative to the largest element of its tensor. Rounding makes up
to 1e-5. Then step() alone with the 148 tensors of GPT-2 (124M parameters): time by events, the median of 30 steps; how
long the host is busy with a step; how often it launches a kernel, and which ones, copies included.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoopt import AutoAdaGrad, AutoAdam, AutoAdamW, AutoSGD
from autoopt.moments import building

STEPS, WARM, TIMED = 20, 8, 30
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # what CUDA calls them, and then some letters
OURS = {"SGD": AutoSGD, "Adam": AutoAdam, "AdaGrad": AutoAdaGrad}
PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, fused=True),
}


@contextmanager
def path(kernels: bool) -> Iterator[None]:
    """Have the steps inside take one of the two paths, and the passes before them."""
    before = building.ENABLED
    building.ENABLED = kernels
    try:
        yield
    finally:
        building.ENABLED = before


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(37, 1001), nn.ReLU(), nn.Linear(1001, 511), nn.ReLU(), nn.LayerNorm(511), nn.Linear(511, 3)
    ).cuda()


def trained(make: Any, kernels: bool, **options: Any) -> dict[str, Tensor]:
    """Weights and state after some steps, one of them on a batch that is not finite and one with clipped gradients."""
    with path(kernels):
        model = net()
        optimizer = make(model, **options)
        generator = torch.Generator().manual_seed(1)
        for number in range(STEPS):
            x = torch.randn(16, 37, generator=generator).cuda()
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            (loss * torch.inf if number == 7 else loss).backward()
            if number % 5 == 4:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        found = dict(model.state_dict())
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": value for key, value in state.items()}
        optimizer.detach()
    return found


def difference(make: Any, **options: Any) -> float:
    """The largest between the paths."""
    plain, kernels = trained(make, False, **options), trained(make, True, **options)
    worst = 0.0
    for name, value in plain.items():
        other = kernels[name]
        if not torch.equal(value.isnan(), other.isnan()):
            return float("inf")
        value, other = value.nan_to_num().double(), other.nan_to_num().double()
        worst = max(worst, ((value - other).abs().max() / value.abs().max().clamp_min(1e-30)).item())
    return worst


def gpt2_shapes(small: bool) -> list[tuple[int, ...]]:
    layers, width, words, positions = (2, 64, 500, 32) if small else (12, 768, 50257, 1024)
    block: list[tuple[int, ...]] = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(words, width), (positions, width), *block * layers, (width,), (width,)]


class Timed:
    """step() alone: gradients stay, and the statistics of a pass are put where a pass would leave them."""

    def __init__(self, make: Any, small: bool, ours: bool) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(0.02 * torch.randn(shape, device="cuda")) for shape in gpt2_shapes(small)]
        self.optimizer, self.ours = make(self.parameters), ours
        for parameter in self.parameters:
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        self.squares: dict[str, Tensor] = {}
        if ours:
            self.source = self.optimizer._now.source
            names = self.optimizer.param_groups[0]["param_names"]
            for name, parameter in zip(names, self.parameters, strict=True):
                square = parameter.grad.square()
                self.squares[name] = square if self.optimizer.elementwise else square.sum()
            self.source._measure()
            self.sizes = self.source.sizes

    def observe(self) -> None:
        """What a backward pass over 8 parts would have left."""
        if self.ours:
            self.source.squares = dict(self.squares)
            self.source.passes = dict.fromkeys(self.squares, 8)
            self.source.sizes, self.source.current.gathered = self.sizes, 8

    def step(self) -> None:
        self.observe()
        self.optimizer.step()

    def measure(self) -> dict[str, Any]:
        for _ in range(WARM):
            self.step()
        torch.cuda.synchronize()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED)]
        for before, after in events:
            before.record()
            self.step()
            after.record()
        torch.cuda.synchronize()
        host = []
        for _ in range(5):
            start = time.perf_counter()
            self.step()
            host.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
        return {
            "ms": statistics.median(before.elapsed_time(after) for before, after in events),
            "host ms": statistics.median(host),
            **self.kernels(),
        }

    def kernels(self) -> dict[str, Any]:
        """How often a step launches a kernel, which ones the GPU ran, copies included, and how long it is busy."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.step()
            torch.cuda.synchronize()
        found = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        launches = sum(event.name.startswith(LAUNCHES) for event in profiled.events())
        return {
            "launches": launches,
            "kernels": len(found),
            "gpu ms": sum(event.device_time for event in found) / 1e3,
            "names": dict(Counter(event.name[:80] for event in found).most_common()),
        }

    def waits(self) -> str:
        """Whether a step waits for the GPU."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.step()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return "no"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a small model in GPT-2's place")
    options = parser.parse_args()
    assert building.ENABLED, "Triton is not installed, or AUTOOPT_FUSED=0"
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "differences": {}}
    cases = {
        "SGD": (AutoSGD, {}),
        "Adam": (AutoAdam, {}),
        "AdaGrad": (AutoAdaGrad, {}),
        "AdamW": (AutoAdamW, {"lr": 0.5}),
        "Adam, layer, measure_every=2": (AutoAdam, {"granularity": "layer", "measure_every": 2}),
        "SGD, coupled decay": (AutoSGD, {"weight_decay": 0.1, "average": False}),
    }
    for name, (make, settings) in cases.items():
        found["differences"][name] = difference(make, **settings)
        print(f"{name:32} largest relative difference {found['differences'][name]:.1e}", flush=True)
        assert not building._broken, building._broken

    found["times"] = {}
    print(f"\n{'step()':24} {'ms':>7} {'gpu ms':>7} {'host ms':>8} {'launches':>8} {'kernels':>8}  waits")
    for kind in OURS:
        for label, kernels in (("operations", False), ("kernels", True), ("torch, fused", None)):
            if kernels is None and kind not in PLAIN:
                continue
            with path(bool(kernels)):
                timed = Timed(PLAIN[kind] if kernels is None else OURS[kind], options.small, kernels is not None)
                row = {**timed.measure(), "waits": timed.waits()}
                del timed
            torch.cuda.empty_cache()
            found["times"][f"{kind}, {label}"] = row
            print(
                f"{kind + ', ' + label:24} {row['ms']:7.2f} {row['gpu ms']:7.2f} {row['host ms']:8.2f} "
                f"{row['launches']:8} {row['kernels']:8}  {row['waits'][:60]}",
                flush=True,
            )
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
