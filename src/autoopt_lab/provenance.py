"""When, where and by what a result was made."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import autoopt


def provenance(device: str) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "autoopt": autoopt.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": hardware(device),
        "commit": commit(),
    }


def hardware(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {platform.system()}, {os.cpu_count()} hardware threads"


@cache
def commit() -> str | None:
    """Of the checkout this package is in, with a + where its files differ from it; AUTOOPT_COMMIT where git is not."""
    if given := os.environ.get("AUTOOPT_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
        ours = subprocess.run(
            ["git", "ls-files", "--error-unmatch", Path(__file__).name], cwd=here, capture_output=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == ours.returncode == 0 else None
