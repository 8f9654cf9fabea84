"""The price of a step, for any optimizer: time, memory, and how often it waits for the device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoopt_lab.memory import allocated
from autoopt_lab.peers import METHODS, Method, Training
from autoopt_lab.tasks import Task

REFERENCE = "sgd"  # whose step is 1
WARMUP, ROUNDS, BURST = 3, 20, 3
READS = frozenset({"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"})


@dataclass(frozen=True)
class Cost:
    """Of one step, forward and backward pass included. NaN: it failed."""

    seconds: float = math.nan
    time: float = math.nan  # as a multiple of the reference's, measured beside it
    peak: float = math.nan  # bytes a step holds at the most
    state: float = math.nan  # bytes kept from step to step, beyond model and gradients
    reads: float = math.nan
    failure: str = ""


def costs(task: Task, names: Sequence[str], batch: int) -> dict[str, Cost]:
    """Of a step on the first batch, in this process, with one thread.

    The optimizers take turns within each round, so that a slow moment of the machine hits all of them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            meters = {name: _Meter(task, name, batch) for name in dict.fromkeys([REFERENCE, *names])}
            for _ in range(ROUNDS):
                for meter in meters.values():
                    meter.time()
            return {name: meter.cost(meters[REFERENCE]) for name, meter in meters.items()}
    finally:
        torch.set_num_threads(threads)


class _Meter:
    """Measures the steps of one optimizer, which may fail at any of them."""

    def __init__(self, task: Task, name: str, batch: int) -> None:
        data = task.data()
        self.batch = data.train_inputs[:batch], data.train_targets[:batch]
        self.seconds: list[float] = []
        self.peak = self.state = self.reads = math.nan
        self.failure = ""
        torch.manual_seed(0)
        self._guarded(partial(self._prepare, task, METHODS[name]))

    def _prepare(self, task: Task, method: Method) -> None:
        model = task.model()

        def begin() -> None:
            self.training = Training(task, method, model)
            for _ in range(WARMUP):
                self._step()
            model.zero_grad(set_to_none=True)

        self.state = float(allocated(begin).kept)
        self._step()
        self.peak = float(allocated(self._step).peak)
        with HostReads(self.training.optimizer) as reads:
            self._step()
        self.reads = float(reads.count)

    def _step(self) -> None:
        self.training.step(*self.batch)

    def time(self) -> None:
        def burst() -> None:
            start = time.perf_counter()
            for _ in range(BURST):
                self._step()
            self.seconds.append((time.perf_counter() - start) / BURST)

        if not self.failure:
            self._guarded(burst)

    def _guarded(self, code: Callable[[], None]) -> None:
        try:
            code()
        except Exception as error:  # another's code: whatever goes wrong in it is a result
            self.failure = in_a_line(error)

    def cost(self, reference: _Meter) -> Cost:
        if self.failure:
            return Cost(failure=self.failure)
        ratios = [mine / its for mine, its in zip(self.seconds, reference.seconds, strict=False)]  # of the same round
        time = statistics.median(ratios) if ratios else math.nan
        return Cost(statistics.median(self.seconds), time, self.peak, self.state, self.reads)


class HostReads(TorchDispatchMode):
    """Counts the operations that hand a value of the device to Python: on a GPU each waits for all that is queued.

    torch's optimizers keep their counters `step` on the host; reading those costs nothing and does not count.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch says nothing of it
        self.count = 0
        states = (state for state in optimizer.state.values() if isinstance(state, dict))
        self._counters = {id(state["step"]) for state in states if "step" in state}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS and id(args[0]) not in self._counters:
            self.count += 1
        return func(*args, **(kwargs or {}))


def in_a_line(error: Exception) -> str:
    """For a table: what kind of exception, and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".removesuffix(": ")
