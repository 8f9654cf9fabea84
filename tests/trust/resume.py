"""Runs that are killed and resumed, as a process of their own with one thread, so that it may fork its victims.

    PYTHONPATH=tests python -m trust.resume KILLS SEED SUBJECT:MODE ...

A victim trains on from the last checkpoint and kills itself with SIGKILL at a random step: after its backward pass,
after its step, or in the middle of writing a checkpoint. When it was killed as often as asked, the run is let come to
its end, and its weights must be those of the run that was never killed, bit for bit. Prints where it was killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from contract.small import batches
from trust.subjects import SUBJECTS, Make, glances

MODES = ("float32", "bfloat16", "amp", "accumulation")
EVERY = 3  # steps between checkpoints
MOMENTS = ("after backward", "after step", "while saving")

Killing = tuple[int, str] | None
"""The step and the moment to die at."""


def network(mode: str) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 3))
    return model.to(torch.bfloat16 if mode == "bfloat16" else torch.float32)


@glances()
def life(folder: Path, make: Make, mode: str, steps: int, killing: Killing) -> None:
    """Train from the last checkpoint to the end, or to death."""
    model = network(mode)
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4, enabled=mode == "amp")
    first = load(folder, model, optimizer, scaler)
    data = batches(4 * 7, dtype=next(model.parameters()).dtype)
    for step in range(first, steps):
        optimizer.zero_grad()
        for micro in range(4 if mode == "accumulation" else 1):
            x, y = data[(4 * step + micro) % len(data)]
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "amp"):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
        die_at("after backward", step, killing)
        scaler.step(optimizer)
        scaler.update()
        die_at("after step", step, killing)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            save(folder, step + 1, model, optimizer, scaler, killing)


def save(folder: Path, step: int, model: nn.Module, optimizer: Any, scaler: Any, killing: Killing) -> None:
    content = {
        "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
        "random": torch.get_rng_state(),
    }  # fmt: skip
    torch.save(content, folder / "checkpoint.tmp")
    die_at("while saving", step - 1, killing)
    (folder / "checkpoint.tmp").replace(folder / "checkpoint.pt")


def load(folder: Path, model: nn.Module, optimizer: Any, scaler: Any) -> int:
    """The step to go on from."""
    if not (folder / "checkpoint.pt").exists():
        return 0
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    scaler.load_state_dict(content["scaler"])
    torch.set_rng_state(content["random"])
    step: int = content["step"]
    return step


def die_at(moment: str, step: int, killing: Killing) -> None:
    if killing == (step, moment):
        os.kill(os.getpid(), signal.SIGKILL)


def victim(folder: Path, make: Make, mode: str, steps: int, killing: Killing) -> bool:
    """A life in a child process; whether it was killed."""
    child = os.fork()
    if not child:
        status = 1
        try:
            life(folder, make, mode, steps, killing)
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "a victim failed: its error is above"
    return False


def killed_at(make: Make, mode: str, kills: int, seed: int) -> list[int]:
    """Where the run was killed. Its end is that of the run that was not."""
    chance = random.Random(seed)
    steps = 2 * EVERY * (kills + 1)
    found: list[int] = []
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        life(Path(whole), make, mode, steps, None)  # here, so that the victims find everything imported
        for _ in range(kills):
            path = Path(parts) / "checkpoint.pt"
            done = torch.load(path, weights_only=True)["step"] if path.exists() else 0
            at, moment = done + chance.randrange(2 * EVERY), chance.choice(MOMENTS)
            if moment == "while saving":
                at += EVERY - 1 - at % EVERY
            assert victim(Path(parts), make, mode, steps, (at, moment)), "was not killed"
            found.append(at)
        assert not victim(Path(parts), make, mode, steps, None)
        expected, actual = (
            torch.load(Path(path) / "checkpoint.pt", weights_only=True)["model"] for path in (whole, parts)
        )
        assert all(torch.equal(expected[name], actual[name]) for name in expected), "the resumed run is another"
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for run in sys.argv[3:]:
        at = killed_at(SUBJECTS[run.partition(":")[0]], run.partition(":")[2], int(sys.argv[1]), int(sys.argv[2]))
        print(run, len(at), *at)
