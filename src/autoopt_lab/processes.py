"""Runs side by side, each in a process of one thread."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def each(function: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> Iterator[Result]:
    """`function` of every job, in whatever order they finish."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        for future in as_completed([pool.submit(function, job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the runs that have not begun


def _start_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process answers Ctrl-C, for all
