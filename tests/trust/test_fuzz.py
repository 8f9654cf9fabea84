"""Five hundred random models, loops and options, the same ones each time; `make trust` draws ten thousand others."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from trust.fuzz import Plan, check
from trust.plans import plans


@settings(
    max_examples=500, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(plans())
def test_no_error_but_a_named_one_and_exact_statistics(plan: Plan) -> None:
    check(plan)
