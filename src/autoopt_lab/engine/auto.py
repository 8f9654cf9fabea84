"""What rules that set their own rate and momentum share, and the paper's: Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from autoopt_lab.engine.rules import Rule, State, Step, Trace, divided

LARGEST = 0.999  # of γ1: the rate never falls below 1 - LARGEST


class Statistics(NamedTuple):
    """Inner products in the metric, <a, b> = sum_j a_j b_j / h_j, (K, L) each."""

    variance: Tensor  # V̂, eq. Vgt_est
    gg: Tensor
    gm: Tensor
    mm: Tensor

    def usable(self) -> tuple[Tensor, Tensor]:
        """(K, 1): whether a run's step is taken at all; (K, L): whether a tensor takes part in it."""
        finite = (self.variance.isfinite() & self.gg.isfinite() & self.gm.isfinite() & self.mm.isfinite()).all(
            1, keepdim=True
        )
        return finite, finite & (self.gg > 0)


class Automatic(Rule):
    """What all automatic rules share: the metric, the statistics, and steps that are skipped.

    A step that is not finite leaves the whole run as it was; a tensor whose gradient is zero is left alone.
    """

    moments = True

    def statistics(self, gradient: Tensor, second: Tensor, estimate: Tensor, h: Tensor | None) -> Statistics:
        """`estimate` is the gradient estimate before this step, m."""
        total, N = self.layout.total, self.batch
        g_h, m_h = divided(gradient, h), divided(estimate, h)
        gg = total(gradient * g_h)
        contributions = total(divided(second, h))
        # One sample has no spread: V is then unknown, and rules keep what they have.
        variance = (contributions - gg / N) * (N / (N - 1)) if N > 1 else torch.zeros_like(gg)
        # A sum of squares in exact arithmetic; fmax would hide a NaN.
        variance = torch.where(variance < 0, 0, variance)
        return Statistics(variance, gg, total(gradient * m_h), total(estimate * m_h))

    def keep(self, finite: Tensor, live: Tensor, old: State, new: State) -> State:
        """The new state where it may be used: per run (K, 1), per tensor (K, L), per element (K, D)."""
        element = self.layout.spread(live)
        choice = {1: finite, live.shape[1]: live, element.shape[1]: element}
        return {name: torch.where(choice[x.shape[1]], x, old[name]) for name, x in new.items()}


class Paper(Automatic):
    """Algorithm 1: γ solved per tensor (eq. oracle_est) and smoothed by υ (eq. oracle_est_ewma)."""

    options: ClassVar[Mapping[str, float]] = {"lr": 1.0, "smoothing": 0.999, "start1": LARGEST, "start2": 0.0}

    def start(self, weights: Tensor) -> State:
        per_tensor = weights.new_ones(len(weights), len(self.layout.sizes))
        return {
            "estimate": torch.zeros_like(weights),  # ĝ_{t-1}
            "gamma1": self.option["start1"] * per_tensor,
            "gamma2": self.option["start2"] * per_tensor,
            "beta_power": per_tensor,  # the product of all β so far
            **self.metric.start(weights),
        }

    def step(self, state: State, weights: Tensor, gradient: Tensor, second: Tensor) -> Step:
        new, h = self.metric.next(state, gradient, self.option)
        statistics = self.statistics(gradient, second, state["estimate"], h)
        finite, live = statistics.usable()
        gamma1, gamma2 = state["gamma1"], state["gamma2"]
        if self.batch > 1:
            smoothing = self.option["smoothing"]  # υ
            gamma1, gamma2 = (
                (1 - smoothing) * solved + smoothing * old
                for solved, old in zip(solve(statistics), (gamma1, gamma2), strict=True)
            )
        rate = 1 - gamma1  # α
        momentum = gamma2 / rate  # β
        spread = self.layout.spread
        estimate = spread(rate - gamma2) * gradient + spread(gamma2) * state["estimate"]
        power = momentum * state["beta_power"]
        direction = divided(estimate, h)
        if self.metric.corrected:
            direction = direction / spread(1 - power)
        new |= {"estimate": estimate, "gamma1": gamma1, "gamma2": gamma2, "beta_power": power}
        kept = self.keep(finite, live, state, new)
        moved = torch.where(spread(live), weights - self.option["lr"] * direction, weights)
        rate = 1 - kept["gamma1"]
        trace = Trace(self.option["lr"] * rate, kept["gamma2"] / rate, statistics.variance / statistics.gg)
        return Step(moved, kept, trace)


def solve(s: Statistics) -> tuple[Tensor, Tensor]:
    """γ = A^-1 b where that is feasible, else no momentum and γ1 = V / gg."""
    determinant = s.gg * s.mm - s.gm * s.gm
    gamma1 = s.variance * (s.mm - s.gm) / determinant
    gamma2 = s.variance * s.gm / determinant
    feasible = (gamma1 >= 0) & (gamma1 <= LARGEST) & (gamma2 >= 0) & (gamma2 < 1 - gamma1)  # false for NaN
    ratio = s.variance / s.gg
    fallback = torch.where(ratio < LARGEST, ratio, LARGEST)
    return torch.where(feasible, gamma1, fallback), torch.where(feasible, gamma2, 0)


class PaperAdam(Paper):
    """The paper states no υ; these are the library's, which reproduce its table (the authors' own for Adam)."""

    options: ClassVar[Mapping[str, float]] = {**Paper.options, "smoothing": 0.99999}


class PaperAdaGrad(Paper):
    options: ClassVar[Mapping[str, float]] = {**Paper.options, "smoothing": 0.9995}
