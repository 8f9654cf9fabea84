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
    for _ in range(kills):
        victim = os.fork()
        if not victim:
            run(folder, manifest())
            os._exit(0)
        time.sleep(moments.uniform(0, life))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        print(len(list((folder / "parts").glob("*.npz"))), flush=True)  # chunks done so far


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
