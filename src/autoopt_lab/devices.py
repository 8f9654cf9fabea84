"""Where chunks are trained: on the devices of this machine, with one process for each, or on a Ray cluster.

A GPU that is named several times trains as many chunks at once, from threads of one process, each on a stream of its
own: chunks of few runs leave a GPU idle, and processes would take turns on it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

CPU_PROCESSES = 8  # at most: each holds the data

P = ParamSpec("P")
T = TypeVar("T")


class DeviceError(Exception):
    """A device that is not there; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Pool:
    """Somewhere to train: `submit` hands a function over, and `places` is how many it can run at once by now."""

    name: str
    device: str  # what kind: a chunk is cut to its size
    submit: Callable[..., Future[Any]]
    places: Callable[[], int]


class Place:
    """Where this process trains, and whether it has been asked to stop."""

    def __init__(self, device: str = "cpu", stop: Any = None) -> None:
        self.device = device
        self._stop = stop

    def stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()


here = Place()


def devices(choice: str) -> list[str]:
    """One chunk at a time per entry. "auto": every GPU, else the CPU; "cpu": a process per core; else as listed."""
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    if choice == "auto":
        choice = ",".join(gpus) or "cpu"
    if choice == "cpu":
        return ["cpu"] * min(CPU_PROCESSES, os.cpu_count() or 1)
    for name in choice.split(","):
        if name not in ("cpu", *gpus):
            raise DeviceError(f"there is no device {name!r} here: choose from {', '.join(['auto', 'cpu', *gpus])}")
    return choice.split(",")


@contextmanager
def chosen(on: str, address: str, choice: str) -> Iterator[Pool]:
    """`on` is "here", for devices of this machine, or "ray", for the cluster at `address`."""
    if on == "here":
        with processes(devices(choice)) as pool:
            yield pool
    elif on == "ray":
        from autoopt_lab.ray_cluster import cluster  # it needs ray

        with cluster(address, choice) as pool:
            yield pool
    else:
        raise DeviceError(f"--on {on} is unknown: choose here or ray")


@contextmanager
def processes(names: Sequence[str]) -> Iterator[Pool]:
    """A pool with a process for every device named; a single one, or a GPU however often, is this process itself."""
    global here
    title = ", ".join(names)
    if len(names) == 1:
        here = Place(names[0])
        yield Pool(title, names[0], _Here().submit, lambda: 1)
        return
    if len(set(names)) == 1 and names[0].startswith("cuda"):
        with _streams(names[0], len(names)) as threads:
            yield threads
        return
    spawn = multiprocessing.get_context("spawn")
    queue, stop = spawn.Queue(), spawn.Event()
    for name in names:
        queue.put(name)
    cores = max(1, (os.cpu_count() or 1) // len(names))
    pool = ProcessPoolExecutor(len(names), spawn, initializer=_start, initargs=(queue, stop, cores, sys.argv))
    try:
        yield Pool(title, names[0], pool.submit, lambda: len(names))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _streams(name: str, count: int) -> Iterator[Pool]:
    """A pool with `count` threads of this process on one GPU, each with its stream."""
    global here
    stop = threading.Event()
    here = Place(name, stop)

    def start() -> None:
        torch.cuda.set_stream(torch.cuda.Stream(name))  # of this thread

    pool = ThreadPoolExecutor(count, initializer=start)
    try:
        yield Pool(f"{name}, {count} chunks at once", name, pool.submit, lambda: count)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _start(queue: Any, stop: Any, threads: int, command: list[str]) -> None:
    global here
    here = Place(queue.get(), stop)
    torch.set_num_threads(threads)
    sys.argv = command  # for the record
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process answers Ctrl-C, for all
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its children to stop."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Here(Executor):
    """Runs at once, in this process, what is submitted."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
