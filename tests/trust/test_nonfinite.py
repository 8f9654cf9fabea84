"""A batch that is not finite, of every kind, before each of thirty steps."""

from __future__ import annotations

from trust.nonfinite import trials
from trust.subjects import Make, every_optimizer


@every_optimizer
def test_run_equals_the_run_that_never_saw_a_bad_batch(make: Make) -> None:
    assert trials(make, 30, seed=1) == 30
