"""Triton's interpreter, as it is to run the kernels under test."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"

elsewhere = pytest.mark.skipif(GPU or INTERPRETED, reason="the tests run here")
here = pytest.mark.skipif(not (GPU or INTERPRETED), reason="runs in a process of its own, see test_in_the_interpreter")


def run_interpreted(tests: str) -> None:
    """Run the tests of a file, or of a class in it, once more in a process of their own, under TRITON_INTERPRET=1.

    It must be set before Triton is imported.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loops go up to numbers that were computed: Triton 3.6 makes ints of them in a way that numpy 2.4 refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patched = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
