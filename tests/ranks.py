"""Several ranks: functions in processes of their own, and scripts that torchrun starts."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RACE = "terminate called without an active exception"


def torchrun(*script: str | Path, folder: Path | None = None, seconds: int = 120) -> str:
    """What a script that ends well on two ranks prints.

    It is started anew where a thread of gloo met the end of the interpreter: it drops a tensor, which needs Python, and
    aborts the process or waits for ever. torch.optim.SGD under DistributedDataParallel does so too, on a busy machine.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *map(str, script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(4):
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
            output, errors = process.communicate()
            errors += f"\nnot done after {seconds} s"
            continue
        if process.returncode == 0:
            return output
        if RACE not in errors:
            break
    raise AssertionError(errors)


def on_ranks(ranks: int, work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Call `work(rank, ranks, folder, *arguments)` in so many processes that form a group."""
    preload = ["autoopt", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    multiprocessing.set_forkserver_preload(preload)  # imported once, not by each process
    mp.start_processes(_rank, (ranks, work, folder, arguments), nprocs=ranks, start_method="forkserver")


def _rank(number: int, ranks: int, work: Callable[..., None], folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=ranks)
    work(number, ranks, folder, *arguments)
    dist.destroy_process_group()
