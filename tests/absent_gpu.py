"""A GPU that is not there: kernels are compiled for it where they would have been started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ROOM = 227 * 1024  # bytes of shared memory that a program may have on an H200


class Absent:
    """What Triton asks a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the kernels that would have been started, and were compiled instead."""
    found: list[str] = []
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= ROOM
        found.append(kernel.name)
        return kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Absent())
    monkeypatch.setattr(JITFunction, "run", compile_it)
    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda self, grid: lambda *numbers: None)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: torch.no_grad())
    return found
