"""The mathematics as pure functions on stacked tensors: one entry for each tuned unit. Knows no module."""

from autoopt.oracle import relative
from autoopt.oracle.estimate import GAMMA_MAX, smooth, solve, variance
from autoopt.oracle.truth import true_oracle

__all__ = ["GAMMA_MAX", "relative", "smooth", "solve", "true_oracle", "variance"]
