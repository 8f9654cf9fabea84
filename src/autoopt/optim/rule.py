"""What a rule decides: how the gradient is filtered into a direction, and how long the step along it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from autoopt.optim.bucket import Bucket

Lengths = Callable[[], Sequence[Tensor]]
"""|d|² of the direction and |w|² of the weights, for each unit; what is not asked for is not computed."""


class Products(NamedTuple):
    """Inner products in the metric, <a, b> = Σ a b / ĥ, one for each unit; m = ĝ of the step before."""

    gg: Tensor
    gm: Tensor
    mm: Tensor | None  # None where the rule does not ask for it
    variance: Tensor  # V̂ of the gradient, or of the last one whose was measured
    live: Tensor  # whether the unit moves: a finite gradient that is not zero
    measured: Tensor  # whether, besides, there is a spread to go by


class Rule(Protocol):
    """Learns from the products of a step, then says what to do. Every change passes through `live` or `measured`."""

    asks_mm: bool  # whether it asks for <m, m>

    def statistics(self, group: dict[str, Any]) -> Mapping[str, float | Sequence[float]]:
        """What is kept for each unit, and its start. "carry" is Π β_s, what is left of the zero that ĝ started from.

        All rules have "count", n, which the average of the weights goes by, and "noise", V̂/<g,g> of the last step.
        """

    def filter(self, group: dict[str, Any], bucket: Bucket, products: Products) -> tuple[Tensor, Tensor]:
        """(a, b) of ĝ ← a ĝ + b g, for each unit."""

    def length(
        self, group: dict[str, Any], bucket: Bucket, products: Products, kept: Tensor, lengths: Lengths
    ) -> tuple[Tensor, Tensor]:
        """What to multiply the direction by, and which share of `weight_decay` shrinks the weights if decoupled.

        `kept` is a of `filter`.
        """

    def chosen(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Rate and momentum of each unit, for the user to see."""
