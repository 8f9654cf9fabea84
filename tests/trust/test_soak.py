"""A thousand steps; `make trust` takes a hundred thousand."""

from __future__ import annotations

import pytest

from trust.soak import soak
from trust.subjects import OPTIMIZERS, Make


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_nothing_grows_and_nothing_is_left(make: Make) -> None:
    found = soak(make, 1000)
    assert found.tensors == 0
    assert found.objects <= 50  # caches of Python and torch; a leak would be 900 at least
    assert found.slope < 4000  # bytes per step; the counts above are what is exact
