"""Times every kernel of the engine, with its default launch and with others. Part of engine_gpu.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from engine_cases import NETS, attempt, fused, log, milliseconds, runs_for

from autoopt_lab.engine import Net

CASES = ((128, False), (8, False), (128, True))  # batch, second moments
ALTERNATIVES = 6
LAUNCHES: dict[str, list[dict[str, int]]] = {
    "forward": [
        {"num_stages": 1}, {"num_stages": 2}, {"BM": 64, "num_stages": 1}, {"BM": 128, "num_stages": 1},
        {"BM": 128, "BE": 32, "num_stages": 1}, {"BM": 32, "num_stages": 1},
    ],
    "window_gradient": [
        {"BM": 128}, {"BM": 32}, {"BK": 16}, {"BM": 128, "BK": 16}, {"BE": 32}, {"BE": 128, "num_warps": 8},
    ],
    "conv_weight_gradient": [
        {"BE": 128, "num_stages": 1}, {"BP": 64, "BE": 64, "num_stages": 1}, {"BP": 16, "BE": 64, "num_stages": 1},
        {"BE": 32, "num_stages": 1}, {"BP": 64, "BE": 32, "num_stages": 1},
        {"BE": 64, "num_stages": 1, "num_warps": 8},
    ],
    "linear_weight_gradient": [
        {"num_stages": 1}, {"BE": 32}, {"BE": 128, "num_warps": 8}, {"BE": 32, "BO": 32}, {"num_warps": 2},
        {"BE": 128, "BO": 16, "num_stages": 1},
    ],
    "fold": [{"BLOCK": b, "num_warps": w} for b, w in ((256, 4), (512, 4), (1024, 4), (2048, 2), (2048, 8), (128, 4))],
    "collect": [{"BLOCK": b, "num_warps": w} for b, w in ((32, 1), (64, 1), (64, 2), (128, 1), (256, 4), (512, 4))],
}  # fmt: skip


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


class Timed:
    """Stands in for a kernel: times each launch; one that fails is reported and left out.

    Launches are replayed from a CUDA graph, as in training: the host takes longer to launch a small kernel (some 50 us)
    than the GPU to run it.
    """

    def __init__(self, name: str, kernel: Any, times: list[tuple[str, float]], repeats: int) -> None:
        self.name, self.kernel, self.times, self.repeats = name, kernel, times, repeats

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            label = f"{self.name} C={options.get('C')} O={options.get('O')}"
            try:
                self.kernel[grid](*arguments, **options)
                torch.cuda.synchronize()
            except Exception as error:  # a launch may ask for more shared memory than there is
                log(f"{label} {options}: {type(error).__name__}: {str(error)[:200]}")
                return
            if self.repeats:
                self.times.append((label, self._replayed(grid, arguments, options)))

        return launch

    def _replayed(self, grid: Any, arguments: Any, options: Any) -> float:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            graph.capture_begin()
            for _ in range(self.repeats):
                self.kernel[grid](*arguments, **options)
            graph.capture_end()
        torch.cuda.synchronize()
        return milliseconds(graph.replay, 1) / self.repeats


def kernel_times(
    net: Net, backend: Any, runs: int, batch: int, moments: bool = False, repeats: int = 10
) -> dict[str, float]:
    """Milliseconds per launch; with no repeats the kernels are only compiled."""
    from autoopt_lab.engine import kernels

    times: list[tuple[str, float]] = []
    originals = {kernel: getattr(kernels, kernel) for kernel in [*LAUNCHES, "expand"]}
    try:
        for kernel, original in originals.items():
            setattr(kernels, kernel, Timed(kernel, original, times, repeats))
        one_gradient(net, backend, runs, batch, moments)()
    finally:
        for kernel, original in originals.items():
            setattr(kernels, kernel, original)
    return dict(times)


def tune(name: str, batch: int, moments: bool) -> dict[str, dict[str, float]]:
    """Every kernel's microseconds with every launch of LAUNCHES, and with the default."""
    net = NETS[name]
    found: dict[str, dict[str, float]] = {}
    for which in (None, *range(ALTERNATIVES)):
        with attempt(f"tuning {name} {which}"):
            backend = fused(net)
            set_launches(backend, which)
            for label, ms in kernel_times(net, backend, runs_for(batch), batch, moments).items():
                kernel = label.split()[0]
                if which is None or kernel in LAUNCHES:
                    launch = "default" if which is None else json.dumps(LAUNCHES[kernel][which])
                    found.setdefault(label, {})[launch] = round(ms * 1e3, 1)
    return found


def table(results: dict[str, Any]) -> None:
    log("\nmicroseconds per kernel, 16384 samples (N=8: 8192)")
    for key, times in results["kernels"].items():
        log(f" {key}: total {sum(times.values()) * 1e3:.0f}")
        for label, ms in times.items():
            log(f"   {label:40} {ms * 1e3:8.1f}")
    for key, kernels in results["tuning"].items():
        log(f"\nlaunches that beat the default by 3 % and more, {key}")
        for label, launches in kernels.items():
            best = min(launches, key=lambda launch: launches[launch])
            if launches[best] < 0.97 * launches.get("default", 0):
                log(f"   {label:40} {launches['default']:8.1f} -> {launches[best]:8.1f} with {best}")
