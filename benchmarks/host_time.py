"""The host's part of an eager step on a GPU, without one: by phases, over that of the plain step.

    python benchmarks/host_time.py [--profile forward]        # CPU, one thread, about ten seconds

A ResNet-18 whose layers are so narrow that a CPU spends its time on Python, autograd and the start of operations, and
our kernels replaced by such as do nothing: a GPU would run them, and the host go on. What it takes the host to start
them is missing, some microseconds for each: one for a layer, and five for a step. All take turns, step by step; process
time, the lower quartile, as whatever else the machine does only adds to it.
"""

import argparse
import contextlib
import cProfile
import itertools
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_check import resnet18
from torch import Tensor, nn

from autoopt import AutoAdam, AutoSGD
from autoopt.capture import alone, inputs, lengths, sampled
from autoopt.moments import building
from autoopt.optim import fused

WARM, STEPS, SAMPLES, WIDTH = 40, 250, 4, 4
PHASES = ("forward", "backward", "step")
MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True),
    "AutoSGD": AutoSGD,
    "AutoAdam": AutoAdam,
}


class Plan:
    """That of a kernel for one sample."""

    width = 256

    def start(self, tensors: Sequence[Tensor], weight: Tensor, bias: Tensor) -> bool:
        for tensor in (*tensors, weight, bias):
            tensor.data_ptr()
        return True


class Kernel:
    """One that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


class Pieces:
    """Those whose lengths a kernel takes."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.number = len(sizes)

    def lengths(self, addresses: Tensor) -> Tensor:
        return torch.ones(self.number, dtype=torch.float64)


def everywhere(device: torch.device) -> bool:
    return True


def here(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers)


def nowhere(tensor: Tensor) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def module(name: str, **content: Any) -> Any:
    """Have a module of kernels hold this instead, and need no Triton."""
    made = ModuleType(name)
    vars(made).update(content)
    folder, _, last = name.rpartition(".")
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.dict("sys.modules", {name: made}))
    stack.enter_context(mock.patch(f"{folder}.{last}", made, create=True))
    return stack


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Have all go the way that it goes on a GPU, where every layer of the net is large."""
    kernels = {name: Kernel() for name in ("sums", "decide", "update")}
    with contextlib.ExitStack() as stack:
        for where in (alone, lengths, fused):
            stack.enter_context(mock.patch.object(where, "available", everywhere))
        for where in (building, fused):
            stack.enter_context(mock.patch.object(where, "pinned", here))
        stack.enter_context(mock.patch.object(torch.cuda, "device_of", nowhere))
        stack.enter_context(mock.patch.object(sampled, "ROOM", 0))
        stack.enter_context(mock.patch.object(inputs, "LOOKS", 1))
        stack.enter_context(module("autoopt.moments.one", plan=lambda *arguments: Plan()))
        stack.enter_context(module("autoopt.moments.length", Pieces=Pieces))
        stack.enter_context(module("autoopt.optim.kernels", TILE=[8, 4, 4], WARPS=2, **kernels))
        yield


class Loop:
    """A net under one optimizer."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = resnet18(WIDTH)
        self.optimizer = make(self.model)
        self.x, self.y = torch.randn(SAMPLES, 3, 8, 8), torch.randint(0, 10, (SAMPLES,))
        self.times: list[list[float]] = []

    def step(self, profiler: cProfile.Profile | None = None, phase: str = "") -> None:
        self.optimizer.zero_grad()
        loss = torch.zeros(())

        def forward() -> None:
            nonlocal loss
            loss = F.cross_entropy(self.model(self.x), self.y)

        clock = [time.process_time()]
        for name, run in zip(PHASES, (forward, lambda: loss.backward(), self.optimizer.step), strict=True):
            if profiler is not None and name == phase:
                profiler.runcall(run)
            else:
                run()
            clock.append(time.process_time())
        self.times.append([after - before for before, after in itertools.pairwise(clock)])

    def phases(self) -> list[float]:
        """Milliseconds."""
        return [1e3 * statistics.quantiles(phase, n=4)[0] for phase in zip(*self.times[WARM:], strict=True)]


def main() -> None:
    """Print a line for each optimizer, or what AutoSGD does in one phase."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", choices=PHASES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with as_on_a_gpu():
        if options.profile:
            loop, profiler = Loop(AutoSGD), cProfile.Profile()
            for number in range(WARM + STEPS):
                loop.step(profiler if number >= WARM else None, options.profile)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
            return
        loops = {name: Loop(make) for name, make in MAKE.items()}
        for _ in range(WARM + STEPS):
            for loop in loops.values():
                loop.step()
        plain = sum(loops["plain"].phases())
        for name, loop in loops.items():
            of = ", ".join(f"{phase} {ms:.2f}" for phase, ms in zip(PHASES, loop.phases(), strict=True))
            print(f"{name:8} {sum(loop.phases()) / plain:.2f}   {of} ms")
    print(f"one CPU thread, process time; torch {torch.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
