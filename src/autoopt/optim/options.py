"""The options that all optimizers have, and refusing those that make no sense, with words that say which would."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

from torch import Tensor

from autoopt.oracle import GAMMA_MAX

GRANULARITIES = ("tensor", "layer", "group")
RULES = ("robust", "paper")
SPREADS = ("samples", "passes")


class Shared(TypedDict, total=False):
    """The options that every optimizer has; `AutoOptimizer` says what they mean."""

    param_groups: Iterable[dict[str, Any]] | None
    lr: float
    rule: str
    average: bool
    spread: str
    measure_every: int
    exact: bool
    weight_decay: float
    decoupled_weight_decay: bool
    granularity: str
    smoothing: float | None
    start: tuple[float, float]


def number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
) -> None:
    """Refuse an option that is not a finite number with low <= value <= high and above < value < below."""
    if isinstance(value, Tensor):
        raise ValueError(f"{name} as a Tensor is not supported: give a number.")
    real = isinstance(value, Real)  # numpy's are, too
    inside = real and low <= value <= high and above < value < below
    if inside and -math.inf < value < math.inf:  # math.isfinite would not be traced
        return
    limits = {"at least": low, "above": above, "at most": high, "below": below}
    allowed = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
    raise ValueError(f"{name} is {value!r}; it must be a finite number {allowed}.")


def whole(name: str, value: Any, *, low: int) -> None:
    """Refuse an option that is not a whole number of at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < low:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}.")


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse an option that is not one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def flag(name: str, value: Any) -> None:
    """Refuse an option that is not True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False.")


def check(options: dict[str, Any]) -> None:
    """Refuse shared options that make no sense."""
    number("lr", options["lr"], low=0.0)
    number("weight_decay", options["weight_decay"], low=0.0)
    number("smoothing", options["smoothing"], low=0.0, below=1.0)
    whole("measure_every", options["measure_every"], low=1)
    try:
        gamma1, gamma2 = options["start"]
    except (TypeError, ValueError):
        raise ValueError(f"start is {options['start']!r}; it must be a pair (γ1, γ2).") from None
    number("start[0] (γ1)", gamma1, low=0.0, high=GAMMA_MAX)
    number("start[1] (γ2)", gamma2, low=0.0, below=1.0 - gamma1)
    choice("rule", options["rule"], RULES)
    choice("granularity", options["granularity"], GRANULARITIES)
    flag("average", options["average"])
    flag("exact", options["exact"])
    flag("decoupled_weight_decay", options["decoupled_weight_decay"])
