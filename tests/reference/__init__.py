"""The paper's mathematics in float64, as slow and as obvious as possible. Shares no code with the library."""

from reference.algorithm import NaiveAuto, units_of
from reference.contributions import contributions, double
from reference.robust import NaiveRobust

__all__ = ["NaiveAuto", "NaiveRobust", "contributions", "double", "units_of"]
