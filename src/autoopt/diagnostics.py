"""What was chosen: the only place where numbers leave the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tuned:
    """What the optimizer chose for one parameter."""

    lr: float
    """The learning rate in force: α, times the group's `lr`; of rule="robust" 0 before the first step."""
    momentum: float
    """β, the share of the previous estimate in the new one."""
    noise: float
    """V̂/<g,g> of the last step that measured it, not smoothed, in the optimizer's metric; before that not a number."""


def tuned(names: Sequence[str], tables: Sequence[Tensor]) -> dict[str, Tuned]:
    """Name the rows (lr, momentum, noise) of the tables, in their order. The one host read."""
    if not tables:  # nothing trains
        return {}
    device = tables[0].device
    rows = torch.cat([table.to(device) for table in tables]).tolist()
    return {name: Tuned(*row) for name, row in zip(names, rows, strict=True)}
