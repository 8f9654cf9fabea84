"""A Ray cluster as a pool: one Ray task per chunk.

The results come back to the process that asked for them, which alone writes the run folder: a machine that is lost
costs the chunks it was at, and Ray gives those to another. Every machine needs autoopt, and finds data and task files
under the same paths (or, for the data, through its own AUTOOPT_DATA or download).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from autoopt_lab import devices
from autoopt_lab.devices import CPU_PROCESSES, DeviceError, Pool

RETRIES = 3  # of a chunk whose machine or process was lost


@contextmanager
def cluster(address: str, choice: str) -> Iterator[Pool]:
    """The cluster at HOST:PORT, or "auto" for the one this machine is part of. `choice`: auto, cpu or cuda."""
    ray = _ray()
    if choice not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"--device {choice} does not name a kind of device: with --on ray, choose auto, cpu or cuda")
    try:
        if ":" in address:
            _knock(address)
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        remedy = "start one with: ray start --head; and name it with --address"
        raise DeviceError(f"no Ray cluster answers at {address} ({reason}): {remedy}") from None
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if choice == "cuda" and not gpus:
            raise DeviceError(f"the Ray cluster at {address} has no GPU: choose --device cpu")
        device = "cuda" if gpus and choice != "cpu" else "cpu"
        yield Pool(f"the Ray cluster at {address}", device, _submit(ray, device), lambda: _places(ray, device))
    finally:
        ray.shutdown()


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DeviceError("--on ray needs ray, which is not installed: run: pip install 'autoopt[ray]'") from None
    return ray


def _knock(address: str) -> None:
    """OSError where nobody answers, at once; Ray would try for minutes. An address is HOST:PORT or ray://HOST:PORT."""
    url = urlsplit(address if "//" in address else f"//{address}")
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10):
        pass


def _places(ray: Any, device: str) -> int:
    """One chunk per GPU, or per core up to what a machine's memory should bear; machines may come and go."""
    resources = ray.cluster_resources()
    if device == "cuda":
        return max(1, int(resources.get("GPU", 0)))
    machines = len([node for node in ray.nodes() if node["Alive"]])
    return max(1, min(int(resources.get("CPU", 0)), CPU_PROCESSES * machines))


def _submit(ray: Any, device: str) -> Callable[..., Future[Any]]:
    remote = ray.remote(num_cpus=1, num_gpus=int(device == "cuda"), max_retries=RETRIES, scheduling_strategy="SPREAD")(
        _train
    )

    def submit(fn: Callable[..., Any], jobs: Any, conditions: Any, data: Path | None, deadline: float) -> Future[Any]:
        left = deadline - time.monotonic()  # a clock that no other machine has
        place = (device, str(Path.cwd()), sys.argv)
        task = remote.remote(place, fn, jobs, conditions, data and data.absolute(), time.time() + left)
        answer: Future[Any] = Future()
        task.future().add_done_callback(lambda done: _settle(ray, answer, done))
        return answer

    return submit


def _settle(ray: Any, answer: Future[Any], done: Future[Any]) -> None:
    """Ray wraps what a task raises into an error of its own, with the other machine's traceback for its text."""
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    elif isinstance(error, ray.exceptions.RayTaskError):
        answer.set_exception(error.cause)
    else:
        name = type(error).__name__
        remedy = "look at the cluster with: ray status; and run it again"
        answer.set_exception(DeviceError(f"the Ray cluster lost a chunk {RETRIES + 1} times ({name}): {remedy}"))


def _train(
    place: tuple[str, str, list[str]], fn: Callable[..., Any], jobs: Any, conditions: Any, data: Path | None, end: float
) -> Any:
    """On the other machine, in a process of Ray's that has its own GPU or core."""
    device, folder, sys.argv = place
    with suppress(OSError):
        os.chdir(folder)  # a task file may be named by a relative path
    devices.here = devices.Place("cuda:0" if device == "cuda" else device)  # Ray shows each task its own GPU alone
    if device == "cpu":
        torch.set_num_threads(1)
    return fn(jobs, conditions, data, time.monotonic() + end - time.time())
