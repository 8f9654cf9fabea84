"""What was watched."""

from __future__ import annotations

from typing import Any

import pytest

from autoopt.capture import bare


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that were watched, one after the other."""
    found: list[str] = []

    class Noted(bare.Watch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self.module)

    monkeypatch.setattr(bare, "Watch", Noted)
    return found
