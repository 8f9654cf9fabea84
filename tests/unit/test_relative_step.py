"""The length of a step relative to that of the weights."""

import itertools

import pytest
import torch
from torch import Tensor

from autoopt.oracle.relative import relative_step
from reference import robust

COUNTS, AGES = (0.5, 1, 7, 120, 400, 2_000, 4_000, 100_000), (1, 30, 100, 250, 900, 100_000)
SHARES = (-1.0, 0.0, 0.004, 0.02, 0.03, 0.1, 0.15, 0.2, 0.25, 0.3, 0.36, 0.7, 1.0)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("share", SHARES)
def test_equals_the_naive_one(share: float) -> None:
    for count, age in itertools.product(COUNTS, AGES):
        found = relative_step(number(count), number(age), number(share)).item()
        assert found == pytest.approx(robust.relative_step(count, age, share), rel=1e-14, abs=0), (count, age)


def test_long_runs_take_longer_steps_where_the_signal_is_clear() -> None:
    late = [relative_step(number(1e4), number(1e4), number(share)).item() for share in (0.0, 0.05, 0.5)]
    assert late == pytest.approx([0.001, 0.002, 0.003])


def test_first_steps_are_long_only_where_the_signal_is_clear() -> None:
    first = [relative_step(number(150), number(150), number(share)).item() for share in (0.0, 0.2, 0.25, 0.5)]
    assert first == pytest.approx([0.006, 0.006, 0.06 * 0.25**1.5, 0.009])
