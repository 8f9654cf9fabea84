"""What is logged of an optimizer, and under which names."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

from autoopt.diagnostics import Tuned


class Automatic(Protocol):
    """What is asked of an optimizer that is watched."""

    def tuned(self) -> dict[str, Tuned]: ...


def unwrap(optimizer: Any) -> Automatic:
    """The automatic optimizer inside the wrapper that Accelerate or Lightning put around it."""
    inner = optimizer
    while hasattr(inner, "optimizer"):  # asked first: Lightning's wrapper imitates all methods of the optimizer
        inner = inner.optimizer
    if not hasattr(inner, "tuned"):
        raise TypeError(
            f"{type(inner).__name__} has no tuned(): pass an AutoSGD, AutoAdam or other automatic optimizer, or the "
            "wrapper of one."
        )
    return cast(Automatic, inner)


def readings(tuned: Mapping[str, Tuned]) -> dict[str, float]:
    """Flat names for loggers: rate/NAME, momentum/NAME and noise/NAME of each parameter; less what is not known yet."""
    values = {
        f"{kind}/{name}": value
        for name, chosen in tuned.items()
        for kind, value in (("rate", chosen.lr), ("momentum", chosen.momentum), ("noise", chosen.noise))
    }
    return {key: value for key, value in values.items() if math.isfinite(value)}
