"""The paper's mathematics in float64, as slow and as obvious as possible. Shares no code with the library."""

from reference.algorithm import NaiveAuto, units_of
from reference.contributions import contributions, double

__all__ = ["NaiveAuto", "contributions", "double", "units_of"]
