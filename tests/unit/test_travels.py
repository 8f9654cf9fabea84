"""What the robust rule says of all units together: whether the weights travel, and the share of signal."""

import pytest
import torch

from autoopt.oracle.relative import ENOUGH, FIRST, STEADY, USUAL, WORST, signal, travels


def said(
    alignment: list[float],
    noise: list[float],
    usual: list[float],
    age: int,
    live: list[bool] | None = None,
    lasting: list[float] | None = None,
) -> bool:
    live = [True] * len(alignment) if live is None else live
    lasting = alignment if lasting is None else lasting
    age_of_each = torch.full((len(alignment),), float(age))
    return bool(travels(*map(torch.tensor, (alignment, lasting, noise, usual)), age_of_each, torch.tensor(live)))


def test_beyond_the_noise() -> None:
    assert said([STEADY + 0.01], [1.0], [10.0], USUAL + 1)
    assert not said([STEADY - 0.01], [1.0], [10.0], USUAL + 1)
    assert not said([9.0], [1.0], [10.0], FIRST)  # too early to say


def test_beyond_the_usual() -> None:
    """The noise of a small batch is far larger than what its alignment ever comes to."""
    assert said([0.011], [1.0], [0.01], USUAL + 1)
    assert not said([0.009], [1.0], [0.01], USUAL + 1)
    assert not said([0.011], [1.0], [0.01], USUAL)
    assert not said([0.2], [1.0], [0.01], USUAL + 1, lasting=[0.009])  # one sample, and not yet a shift
    assert said([0.4], [1.0], [0.01], USUAL + 1, lasting=[0.009])  # beyond all noise: no need to wait


def test_one_answer_by_the_mean_of_those_that_are_known() -> None:
    assert said([0.5, 0.2], [1.0, 1.0], [9.0, 9.0], 50)
    assert not said([0.5, 0.0], [1.0, 1.0], [9.0, 9.0], 50)
    assert said([0.5, 0.0], [1.0, 0.0], [9.0, 0.0], 50)  # a tensor without noise was never reached
    assert not said([0.0], [0.0], [0.0], 500)


def test_a_unit_that_takes_no_step_is_not_asked() -> None:
    assert said([9.0, 0.0], [1.0, 1.0], [9.0, 9.0], 50)
    assert not said([9.0, 0.0], [1.0, 1.0], [9.0, 9.0], 50, [False, True])
    assert not said([9.0, 9.0], [1.0, 1.0], [9.0, 9.0], 50, [False, False])


def share(variance: list[float], gradient: list[float], known: list[bool]) -> float:
    return signal(torch.tensor(variance), torch.tensor(gradient), torch.tensor(known)).item()


def test_signal_is_the_mean_over_what_is_known() -> None:
    assert share([0.5, 1.2], [1.0, 1.0], [True, True]) == pytest.approx(0.15)
    assert share([0.5, 0.0, 7.0], [1.0, 0.0, 1.0], [True, True, False]) == pytest.approx(0.5)
    assert share([float("nan"), 0.5], [1.0, 1.0], [False, True]) == pytest.approx(0.5)


def test_signal_of_one_unit_never_outweighs_all_others() -> None:
    """A bias before BatchNorm: what samples add to it cancels, and <g, g> is nothing but rounding."""
    assert share([1e12, 0.1, 0.1], [1.0, 1.0, 1.0], [True] * 3) == pytest.approx((WORST + 1.8) / 3)


def test_signal_where_nothing_is_known() -> None:
    assert share([0.5, 0.5], [1.0, 1.0], [False, False]) == pytest.approx(ENOUGH)
    assert share([0.0], [0.0], [True]) == pytest.approx(ENOUGH)
