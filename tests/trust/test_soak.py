"""A few hundred steps; `make trust` takes a hundred thousand, and looks at the memory of the process too."""

from __future__ import annotations

import pytest

from trust.soak import soak
from trust.subjects import OPTIMIZERS, Make


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_nothing_grows_and_nothing_is_left(make: Make) -> None:
    found = soak(make, 400)
    assert found.tensors <= 0  # fewer: what an earlier test left was freed
    assert found.objects <= 50  # caches of Python and torch; a leak would be 300 at least
