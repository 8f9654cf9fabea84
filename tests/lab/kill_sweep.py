"""Runs one sweep again and again, killing it at a random moment, until it has been killed as often as asked.

    python kill_sweep.py FOLDER KILLS

A process of its own, with one thread, so that it may fork: torch is imported once and not for every victim.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from sweep_tools import manifest, run


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm:  # a victim shall spend its life on the sweep, not on first calls
        run(Path(warm) / "first", manifest(1))
        start = time.monotonic()
        run(Path(warm) / "second", manifest(1))
        life = time.monotonic() - start  # of an eighth of the sweep
    moments = random.Random(1)
    for kill in range(kills):
        victim = os.fork()
        if not victim:
            run(folder, manifest())
            os._exit(0)
        if kill % 4 == 3:  # however slow the machine is, some get on
            wait_for(chunks(folder) + 1, folder, victim)
        time.sleep(moments.uniform(0, life))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        print(chunks(folder), flush=True)


def chunks(folder: Path) -> int:
    """Those that are done."""
    return len(list((folder / "parts").glob("*.npz")))


def wait_for(number: int, folder: Path, victim: int) -> None:
    """Wait until so many chunks are done, or nothing is left for the victim to do."""
    while chunks(folder) < number and not os.waitid(os.P_PID, victim, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
