"""When the robust rule says that the weights travel."""

import torch

from autoopt.oracle.relative import FIRST, STEADY, USUAL, travels


def said(alignment: list[float], noise: list[float], usual: list[float], age: int) -> bool:
    return bool(travels(*map(torch.tensor, (alignment, noise, usual)), torch.full((len(alignment),), float(age))))


def test_beyond_the_noise() -> None:
    assert said([STEADY + 0.01], [1.0], [10.0], USUAL + 1)
    assert not said([STEADY - 0.01], [1.0], [10.0], USUAL + 1)
    assert not said([9.0], [1.0], [10.0], FIRST)  # too early to say


def test_beyond_the_usual() -> None:
    """The noise of a small batch is far larger than what its alignment ever comes to."""
    assert said([0.011], [1.0], [0.01], USUAL + 1)
    assert not said([0.009], [1.0], [0.01], USUAL + 1)
    assert not said([0.011], [1.0], [0.01], USUAL)


def test_one_answer_by_the_mean_of_those_that_are_known() -> None:
    assert said([0.5, 0.2], [1.0, 1.0], [9.0, 9.0], 50)
    assert not said([0.5, 0.0], [1.0, 1.0], [9.0, 9.0], 50)
    assert said([0.5, 0.0], [1.0, 0.0], [9.0, 0.0], 50)  # a tensor without noise was never reached
    assert not said([0.0], [0.0], [0.0], 500)
