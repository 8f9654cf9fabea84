"""The estimated oracle: eq. Vgt_est, eq. oracle_est and eq. oracle_est_ewma, batched over all units."""

import torch
from torch import Tensor

GAMMA_MAX = 0.999  # largest γ1, so that the rate α = 1 - γ1 never reaches zero


def variance(square: Tensor, gradient_square: Tensor, samples: Tensor) -> Tensor:
    """V̂ of the mini-batch gradient, eq. Vgt_est, unbiased (Appendix A).

    With c_i = g_i / N what sample i adds to the gradient g = Σ c_i, eq. Vgt_est becomes

        V̂ = N/(N-1) · ( Σ_i <c_i, c_i> - <g, g>/N ),

    which needs neither the loss reduction nor the single gradients. The true value is never negative; one that is
    rounded, or estimated from some of the samples, may be.

    Args:
        square: Σ_i <c_i, c_i>.
        gradient_square: <g, g>.
        samples: N. Where N = 1 there is no spread, and the result is not a number.
    """
    return (samples / (samples - 1)) * (square - gradient_square / samples)


def solve(variance: Tensor, gg: Tensor, gm: Tensor, mm: Tensor) -> tuple[Tensor, Tensor]:
    """γ̂ = Â⁻¹ b̂, eq. oracle_est, in closed form, or the best rate without momentum where that is not feasible.

    With G = [g, g - m], eq. A_matrix_est is Â = [[gg, gg - gm], [gg - gm, gg - 2gm + mm]], so that det Â = gg·mm - gm²,
    and eq. b_vector_est is b̂ = V̂·[1, 1].

    Feasible is what eq. g_est can express: a rate α = 1 - γ1 in [1 - GAMMA_MAX, 1] and a momentum β = γ2/α in [0, 1).
    Everywhere else (m = 0 at the first step, m parallel to g, ...) the problem is solved for γ1 alone: γ = (V̂/gg, 0).

    Args:
        variance: V̂.
        gg: <g, g>, the squared size of the gradient.
        gm: <g, m>, with m = ĝ of the step before.
        mm: <m, m>.
    """
    det = gg * mm - gm * gm
    gamma1 = variance * (mm - gm) / det
    gamma2 = variance * gm / det
    feasible = (gamma1 >= 0) & (gamma1 <= GAMMA_MAX) & (gamma2 >= 0) & (gamma2 < 1 - gamma1)  # False where not finite
    return (
        torch.where(feasible, gamma1, (variance / gg).clamp_max(GAMMA_MAX)),
        torch.where(feasible, gamma2, 0.0),
    )


def smooth(previous: Tensor, new: Tensor, smoothing: float) -> Tensor:
    """γ_E = (1 - υ)·γ̂ + υ·γ_E, eq. oracle_est_ewma. The feasible set is convex, so the average stays in it."""
    return smoothing * previous + (1 - smoothing) * new
