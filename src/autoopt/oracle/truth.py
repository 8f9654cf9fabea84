"""The true oracle, for problems whose gradient, Hessian and noise are known: what the estimator is tested against."""

import torch
from torch import Tensor


def true_oracle(gradient: Tensor, hessian: Tensor, metric: Tensor, covariance: Tensor, estimate: Tensor) -> Tensor:
    """γ_O = A⁻¹ b, eq. oracle: the (γ1, γ2) that minimise the expected loss after the next update.

    With Q = Ĥ⁻¹ H̄ Ĥ⁻¹ and g ~ (ḡ, Σ), the expectations of eq. A_matrix and eq. b_vector are

        A11 = ḡᵀQḡ + tr(QΣ),   A12 = A11 - ḡᵀQm,   A22 = A11 - 2ḡᵀQm + mᵀQm,
        b1  = A11 - ḡᵀĤ⁻¹ḡ,    b2  = b1 - mᵀ(Qḡ - Ĥ⁻¹ḡ).

    Args:
        gradient: ḡ, the true gradient, (p,).
        hessian: H̄, the true Hessian, (p, p).
        metric: the diagonal of Ĥ, (p,).
        covariance: Σ of the mini-batch gradient, (p, p).
        estimate: m = ĝ of the step before, (p,).
    """
    curvature = hessian / torch.outer(metric, metric)  # Q
    natural = gradient / metric
    bent = curvature @ gradient
    a11 = gradient @ bent + (curvature * covariance).sum()
    cross = estimate @ bent
    a12 = a11 - cross
    a22 = a11 - 2 * cross + estimate @ curvature @ estimate
    b1 = a11 - gradient @ natural
    b2 = b1 - cross + estimate @ natural
    matrix = torch.stack([torch.stack([a11, a12]), torch.stack([a12, a22])])
    gamma: Tensor = torch.linalg.solve(matrix, torch.stack([b1, b2]))
    return gamma
