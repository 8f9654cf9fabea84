"""rule="robust": a step relative to the size of the weights, the same for every loss, metric and model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoopt.optim.bucket import Bucket
from autoopt.optim.rule import Lengths, Products
from autoopt.oracle import relative


class Robust:
    """u = β u + (1 - β) g, d = u/ĥ, w ← w - ρ |w| d / rms|d|; ρ falls with n, and n while the data shifts."""

    asks_mm = False

    def statistics(self, group: dict[str, Any]) -> Mapping[str, float | Sequence[float]]:
        return {
            "carry": 1.0,
            "age": 0.0,  # t
            "size": 0.0,  # average of |d|²
            "gradient": 0.0,  # average of <g,g>
            "variance": 0.0, "measured": 0.0,  # average of V̂, and over how many steps
            "alignment": 0.0, "usual": 0.0,  # averages of <g,u> and of its square
            "rate": 0.0,
        }  # fmt: skip

    def filter(self, group: dict[str, Any], bucket: Bucket, products: Products) -> tuple[float, float]:
        known, live = bucket.statistics, products.live
        age = known["age"]  # steps before this one
        spread, whole = _corrected(known["variance"], known["measured"]), _corrected(known["gradient"], age)
        noise = torch.where(known["measured"] > 0, spread.clamp_min(0), whole)  # no spread seen: all may be noise
        correction = 1 - known["carry"]  # u started at zero, and so did the alignment
        estimate = products.gm / correction
        aligned = known["alignment"].lerp(estimate, 1 - relative.MOMENTUM)
        aligned = bucket.keep("alignment", live & (age > 0), aligned)
        usual = _corrected(known["usual"], age - 1).sqrt()  # the first step has no alignment
        travels = relative.travels(aligned / correction, noise, usual, age)
        bucket.keep("count", live & travels, known["count"] / 2)
        bucket.keep("usual", live & (age > 0), _smooth(known["usual"], estimate.square()))

        bucket.keep("gradient", live, _smooth(known["gradient"], products.gg))
        bucket.keep("variance", products.measured, _smooth(known["variance"], products.variance))
        bucket.keep("measured", products.measured, known["measured"] + 1)
        bucket.keep("carry", live, known["carry"] * relative.MOMENTUM)
        return relative.MOMENTUM, 1 - relative.MOMENTUM

    def length(self, group: dict[str, Any], bucket: Bucket, live: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
        known, correction = bucket.statistics, 1 - bucket.statistics["carry"]
        size, square = lengths()
        age = bucket.keep("age", live, known["age"] + 1)
        average = bucket.keep("size", live, _smooth(known["size"], size / correction**2))
        ratio = relative.relative_step(known["count"], age)
        smallest = torch.finfo(bucket.compute).tiny
        rate = relative.rate(ratio, square, bucket.elements, _corrected(average, age), smallest)
        return bucket.keep("rate", live, rate) / correction, ratio

    def chosen(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        rate = bucket.statistics["rate"]
        return rate, torch.full_like(rate, relative.MOMENTUM)


def _smooth(average: Tensor, value: Tensor) -> Tensor:
    return average.lerp(value, 1 - relative.SMOOTHING)


def _corrected(average: Tensor, steps: Tensor) -> Tensor:
    """An average that started at zero so many steps ago, without what is left of that start."""
    return average / -torch.expm1(steps * math.log(relative.SMOOTHING))  # 1 - SMOOTHING**steps
