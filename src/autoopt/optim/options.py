"""Refusing options that make no sense, with words that say which would."""

import math
from collections.abc import Sequence
from typing import Any


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
    if isinstance(value, int | float) and math.isfinite(value) and low <= value <= high and above < value < below:
        return
    limits = {"at least": low, "above": above, "at most": high, "below": below}
    allowed = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
    raise ValueError(f"{name} is {value!r}; it must be a finite number {allowed}.")


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse an option that is not one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")
