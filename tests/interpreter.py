"""Triton's interpreter, as it is to run the kernels under test."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loops go up to numbers that were computed: Triton 3.6 makes ints of them in a way that numpy 2.4 refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patched = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
