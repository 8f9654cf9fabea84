"""The 2x2 solve: always feasible, exact where the solution is, and blind to the scale of the loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoopt.oracle import GAMMA_MAX, smooth, solve

sizes = st.floats(min_value=1e-3, max_value=1e3)
cosines = st.floats(min_value=-1.0, max_value=1.0)


def statistics(V: float, g: float, m: float, cosine: float) -> list[Tensor]:
    """V, gg, gm, mm of a gradient of size g and an estimate of size m with a given angle between them."""
    return [torch.tensor(x, dtype=torch.float64) for x in (V, g * g, g * m * cosine, m * m)]


@settings(deadline=None, max_examples=300, derandomize=True)
@given(V=sizes, g=sizes, m=st.one_of(st.just(0.0), sizes), cosine=cosines)
def test_always_feasible(V: float, g: float, m: float, cosine: float) -> None:
    first, second = solve(*statistics(V, g, m, cosine))
    assert 0 <= first <= GAMMA_MAX
    assert 0 <= second < 1 - first


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    share=st.floats(min_value=0.001, max_value=0.99),
    ratio=st.floats(min_value=1.05, max_value=3.0),
    cosine=st.floats(min_value=0.05, max_value=0.95),
    size=sizes,
)
def test_closed_form_solves_the_system(share: float, ratio: float, cosine: float, size: float) -> None:
    """Where m is longer than g and V small enough for γ1 + γ2 = V mm / det = share, γ is feasible and exact."""
    g, m = size, size * ratio
    V, gg, gm, mm = statistics(share * g * g * (1 - cosine**2), g, m, cosine)
    first, second = solve(V, gg, gm, mm)
    A = torch.stack([torch.stack([gg, gg - gm]), torch.stack([gg - gm, gg - 2 * gm + mm])])
    expected = torch.linalg.solve(A, torch.stack([V, V]))
    torch.testing.assert_close(torch.stack([first, second]), expected, rtol=1e-9, atol=1e-12)
    assert second > 0


def test_the_rate_never_falls_below_its_floor() -> None:
    """m across g: γ1 = V/gg, here 0.9995, which would leave α = 0.0005."""
    first, second = solve(*(torch.tensor(x, dtype=torch.float64) for x in (0.9995, 1.0, 0.0, 1.0)))
    assert first == GAMMA_MAX
    assert second == 0


def test_units_do_not_meet() -> None:
    """One call for all units gives each what it gets alone; a broken one (not a number) stays alone."""
    stacks = torch.tensor(
        [[1.0, 4.0, 1.0, 2.0], [0.3, 1.0, 0.0, 0.0], [0.01, 1.0, 1.0, 2.0], [float("nan"), 1.0, 1.0, 2.0]],
        dtype=torch.float64,
    )
    together = torch.stack(solve(*stacks.T))
    for unit in range(3):
        alone = torch.stack(solve(*stacks[unit]))
        assert torch.equal(together[:, unit], alone)


@pytest.mark.parametrize("exponent", [-300, -90, -30, 30, 90, 300])
def test_scale_of_the_loss_does_not_matter(exponent: int) -> None:
    """Multiplying the loss by k multiplies V, gg, gm and mm by k^2: γ is their ratio."""
    expected = solve(*statistics(0.1, 1.0, 1.5, 0.5))
    assert expected[1] > 0
    scaled = solve(*(x * 2.0**exponent for x in statistics(0.1, 1.0, 1.5, 0.5)))
    torch.testing.assert_close(scaled, expected, rtol=1e-12, atol=0)


def test_smoothing_is_the_papers_moving_average() -> None:
    previous, new = torch.tensor([0.8, 0.1]), torch.tensor([0.4, 0.5])
    torch.testing.assert_close(smooth(previous, new, 0.75), torch.tensor([0.7, 0.2]))
    assert torch.equal(smooth(previous, new, 0.0), new)
    assert torch.equal(smooth(previous, new, 1.0), previous)
