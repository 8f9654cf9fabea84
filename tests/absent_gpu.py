"""A GPU that is not there: kernels are compiled for it where they would have been started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    """The names of the kernels that would have been started, and were compiled instead.

    The first start of one is by its arguments, and later ones by what was compiled then, which takes addresses.
    """
    found: list[str] = []
    given: dict[Any, list[Any]] = {}  # kernel -> its arguments
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= ROOM
        found.append(kernel.name)
        given[kernel] = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args]
        return kernel

    def start_again(kernel: Any, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any) -> None:
            assert list(arguments) == given[kernel]

        assert len(grid) == 3
        return start

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Absent())
    monkeypatch.setattr(JITFunction, "run", compile_it)
    monkeypatch.setattr(CompiledKernel, "__getitem__", start_again)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: torch.no_grad())
    return found
