"""rule="paper": Algorithm 1."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoopt import oracle
from autoopt.optim.bucket import Bucket
from autoopt.optim.rule import Lengths, Products


class Paper:
    """γ = (γ1, γ2) from the inner products, smoothed; ĝ = (1 - γ1 - γ2) g + γ2 ĝ, so that α = 1 - γ1 and β = γ2/α."""

    asks_mm = True

    def __init__(self, corrected: bool) -> None:
        self.corrected = corrected  # whether Ĥ has the factor 1 - β^t of eq. Hessian_Adam

    def statistics(self, group: dict[str, Any]) -> Mapping[str, float | Sequence[float]]:
        return {"gamma": group["start"], "carry": 1.0}

    def filter(self, group: dict[str, Any], bucket: Bucket, products: Products) -> tuple[Tensor, Tensor]:
        assert products.mm is not None
        variance = products.variance.clamp_min(0)  # rounding
        solved = torch.stack(oracle.solve(variance, products.gg, products.gm, products.mm), 1)
        smooth = oracle.smooth(bucket.statistics["gamma"], solved, group["smoothing"])
        gamma1, gamma2 = bucket.keep("gamma", products.measured, smooth).unbind(1)
        bucket.keep("carry", products.live, bucket.statistics["carry"] * gamma2 / (1 - gamma1))
        return gamma2, 1 - gamma1 - gamma2  # eq. g_est_1

    def length(
        self, group: dict[str, Any], bucket: Bucket, products: Products, kept: Tensor, lengths: Lengths
    ) -> tuple[Tensor, Tensor]:
        alpha = 1 - bucket.statistics["gamma"][:, 0]
        # With a β of its own at every step, β^t is their product.
        correction = 1 - bucket.statistics["carry"] if self.corrected else torch.ones_like(alpha)
        return 1 / correction, alpha

    def chosen(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        gamma1, gamma2 = bucket.statistics["gamma"].unbind(1)
        return 1 - gamma1, gamma2 / (1 - gamma1)
