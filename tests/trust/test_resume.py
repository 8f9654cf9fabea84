"""Runs killed by SIGKILL and resumed, and checkpoints of earlier versions."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trust.fixtures.write_checkpoint import continued, network
from trust.resume import MODES
from trust.subjects import SUBJECTS

TESTS = Path(__file__).parents[1]
CHECKPOINTS = sorted((TESTS / "trust" / "fixtures").glob("checkpoint-*.pt"))


def test_killed_run_resumes_bit_for_bit() -> None:
    runs = [f"{subject}:{mode}" for subject, mode in zip(itertools.cycle(SUBJECTS), MODES, strict=False)]
    done = subprocess.run(
        [sys.executable, "-m", "trust.resume", "1", "7", *runs],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [[run, "1"] for run in runs]


def entries() -> list[Any]:
    """(what the checkpoint holds of one optimizer), by version and optimizer."""
    found = []
    for path in CHECKPOINTS:
        content = torch.load(path, weights_only=True)
        found += [pytest.param(subject, entry, id=f"{path.stem}-{subject}") for subject, entry in content.items()]
    return found


@pytest.mark.parametrize(("subject", "entry"), entries())
def test_checkpoint_of_an_earlier_version_goes_on_as_recorded(subject: str, entry: dict[str, Any]) -> None:
    model = network()
    optimizer = SUBJECTS[subject](model)
    model.load_state_dict(entry["model"])
    optimizer.load_state_dict(entry["optimizer"])
    for name, weight in continued(model, optimizer).items():
        torch.testing.assert_close(weight, entry["after"][name], rtol=1e-5, atol=1e-7)  # other machines round otherwise


def test_every_checkpoint_is_found() -> None:
    assert len(CHECKPOINTS) >= 1
