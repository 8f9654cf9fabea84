"""rule="robust": a step relative to the size of the weights, the same for every loss, metric and model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoopt.optim.bucket import ENLARGED, Bucket
from autoopt.optim.rule import Lengths, Products
from autoopt.oracle import relative


class Robust:
    """u = β u + (1 - β) g, d = u/ĥ, w ← w - ρ |w| d / rms|d| or less; ρ falls with n, n and β while the data shifts."""

    asks_mm = False

    def statistics(self, group: dict[str, Any]) -> Mapping[str, float | Sequence[float]]:
        return {
            "carry": 1.0,
            "age": 0.0,  # t
            "start": 0.0,  # |w|² before the first step
            ENLARGED: 1.0,  # by how much small inputs ask for a larger |w|²
            "size": 0.0,  # average of |d|²
            "gradient": 0.0, "variance": 0.0, "measured": 0.0,  # averages of <g,g> and V̂, and over how many steps
            "alignment": 0.0, "usual": 0.0,  # averages of <g,u> and of its square
            "rate": 0.0,
        }  # fmt: skip

    def filter(self, group: dict[str, Any], bucket: Bucket, products: Products) -> tuple[Tensor, Tensor]:
        known = bucket.statistics  # n counts this step already, t does not
        beta = relative.momentum(known["count"], known["age"] + 1)
        return beta, 1 - beta

    def length(
        self, group: dict[str, Any], bucket: Bucket, products: Products, kept: Tensor, lengths: Lengths
    ) -> tuple[Tensor, Tensor]:
        known, live, measured = bucket.statistics, products.live, products.measured
        estimate = products.gm / (1 - known["carry"])  # u started at zero
        later = live & (known["age"] > 0)  # the first step has no alignment
        ever = known["measured"] > 0
        self._look(bucket, live, later, ever, estimate)

        correction = 1 - bucket.keep("carry", live, known["carry"] * kept)
        size, square = lengths()
        size = size / correction.square()
        known["gradient"].masked_fill_(measured > ever, 0.0)  # it begins again with the first V̂
        new = {  # what is averaged, and for which units
            "gradient": (products.gg, torch.where(ever, measured, live)),
            "variance": (products.variance, measured),
            "usual": (estimate.square(), later),
            "size": (size, live),
        }
        values, units = zip(*new.values(), strict=True)
        drawn = torch._foreach_lerp([known[name] for name in new], list(values), 1 - relative.SMOOTHING)
        for each in zip(new, units, drawn, strict=True):
            bucket.keep(*each)
        seen, age = known["measured"].add_(measured), known["age"].add_(live)
        start = bucket.keep("start", live & (age == 1), square)

        # both averages are over the same steps, so that s, by their ratio, needs no correction for the start
        share = relative.signal(known["variance"], known["gradient"], live & (seen > 0))
        ratio = relative.relative_step(known["count"], age, share) * relative.reach(kept)
        smallest, usual = torch.finfo(bucket.compute).tiny, _corrected(known["size"], age)
        rate = relative.rate(ratio, square, start, bucket.elements, known[ENLARGED], usual, size, smallest)
        return bucket.keep("rate", live, rate) / correction, ratio

    def _look(self, bucket: Bucket, live: Tensor, later: Tensor, ever: Tensor, estimate: Tensor) -> None:
        """See whether the weights travel, by what was known before this step and by its alignment; n falls if so."""
        known, age = bucket.statistics, bucket.statistics["age"]
        averages = torch.stack([known["variance"], known["gradient"], known["usual"]])
        spread, whole, usual = _corrected(averages, torch.stack([known["measured"], age, age - 1]))
        noise = torch.where(ever, spread.clamp_min(0), whole)  # no spread seen: all may be noise
        aligned, correction = known["alignment"].lerp(estimate, 1 - relative.MOMENTUM), 1 - relative.MOMENTUM**age
        lasting = torch.minimum(aligned, known["alignment"]) / correction
        aligned = bucket.keep("alignment", later, aligned) / correction
        travels = relative.travels(aligned, lasting, noise, usual.sqrt(), age, live)
        bucket.keep("count", live & travels, known["count"] / 2)

    def chosen(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        known = bucket.statistics
        return known["rate"], relative.momentum(known["count"] + 1, known["age"] + 1)  # of the step to come


def _corrected(average: Tensor, steps: Tensor) -> Tensor:
    """An average that started at zero so many steps ago, without what is left of that start."""
    return average / (1 - relative.SMOOTHING**steps)
