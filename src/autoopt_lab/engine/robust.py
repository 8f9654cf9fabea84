"""The library's default, rule="robust": a step relative to the size of the weights (docs/math.md, "The robust rule").

The laboratory knows the library's public names alone, so the constants are here again; tests/lab/test_engine_library.py
holds every one of them against the library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from autoopt_lab.engine.auto import Automatic, Statistics
from autoopt_lab.engine.rules import State, Step, Trace, divided

MOMENTUM = 0.9  # β of the gradient estimate while the data stays what it is
LIGHT = 0.85  # β after it has changed
SMOOTHING = 0.99  # of sizes and noise
LARGEST = 0.006  # relative step ρ, but at the start
EARLY = 0.009  # there, and
SIGNAL = 0.06  # times s^1.5, s being the share of signal
DECAY = 0.2  # ρ after n steps is at most DECAY/√n, but less where
ENOUGH = 0.03  # s is below this: in proportion to its root,
LEAST = 0.5  # down to this part; and more where
CLEAR = 0.15  # s is above this: in proportion to its root,
MOST = 1.5  # up to so many times
WORST = -1.0  # share of signal that a tensor has at least
WARM_UP = 100  # steps
LONGEST = 1.6  # times its usual length that a direction counts as at most
FLOOR = 0.05  # root mean square weight that a tensor is taken to have at least
SMALL = 0.5  # root mean square of images; the weight that takes smaller ones is taken to be larger than it is,
ENLARGED = 7  # by at most so many powers of two
GROWTH = 2  # and at most so many times that of its start
WINDOW = 4  # the average of the weights is over about the last 1/(WINDOW + 1) of the run
STEADY = 0.3  # alignment over noise from which on the weights travel
FIRST = 10  # steps before anything is said of that
USUAL = 100  # steps before it is known how large an alignment is usual


class Robust(Automatic):
    """u = β u + (1 - β) g, d = u/h, w -= ρ |w| d / rms|d| or less; ρ falls with n, n and β while the data shifts."""

    options: ClassVar[Mapping[str, float]] = {"lr": 1.0}

    def start(self, weights: Tensor) -> State:
        zero = weights.new_zeros(len(weights), len(self.layout.sizes))
        return {
            "estimate": torch.zeros_like(weights),  # u
            "average": weights,
            "age": zero,  # t
            "count": zero,  # n
            "left": zero + 1,  # the product of all β; powers are products, too, which round the same in every run
            "momentum_power": zero + 1,
            "smoothing_power": zero + 1,
            "size": zero,  # averages of |d|², V̂ (or <g,g>, where there is no V̂), <g,g>, <g,u>
            "noise": zero,
            "gradient": zero,
            "alignment": zero,
            "usual": zero,  # average of <g,u>²
            "start": self.layout.total(weights * weights),  # |w|² before the first step
            "rate": zero,  # α
            **self.metric.start(weights),
        }

    def step(self, state: State, weights: Tensor, gradient: Tensor, second: Tensor) -> Step:
        new, h = self.metric.next(state, gradient, self.option)
        statistics = self.statistics(gradient, second, state["estimate"], h)
        finite, live = statistics.usable()
        spread, total = self.layout.spread, self.layout.total

        alignment, usual, travels = self._travels(state, statistics, live)
        count, age = state["count"] + 1, state["age"] + 1
        beta = self._momentum(state, count, age)
        count = torch.where(travels, count / 2, count)
        left = beta * state["left"]
        estimate = spread(beta) * state["estimate"] + spread(1 - beta) * gradient
        direction = divided(estimate, h) / spread(1 - left)  # u started at zero
        now = total(direction * direction)
        size = _smooth(state["size"], now)
        noise = _smooth(state["noise"], self._noise(statistics))
        whole = _smooth(state["gradient"], statistics.gg)
        ratio = self._ratio(count, age, self._signal(noise, whole, live)) * self._reach(beta)
        smoothing_power = SMOOTHING * state["smoothing_power"]
        length = torch.maximum(size / (1 - smoothing_power), now / LONGEST**2).sqrt()
        rate = ratio * self._bounded(total(weights * weights), state["start"]) / length
        moved = weights - self.option["lr"] * spread(rate) * direction
        newest = (WINDOW + 1) / (count.clamp_min(1) + WINDOW)
        new |= {
            "estimate": estimate,
            "average": state["average"] + spread(newest) * (moved - state["average"]),
            "age": age,
            "count": count,
            "left": left,
            "momentum_power": MOMENTUM * state["momentum_power"],
            "smoothing_power": smoothing_power,
            "size": size,
            "noise": noise,
            "gradient": whole,
            "alignment": alignment,
            "usual": usual,
            "rate": rate,
        }
        kept = self.keep(finite, live, state, new)
        to_come = self._momentum(state, kept["count"] + 1, kept["age"] + 1)
        trace = Trace(self.option["lr"] * kept["rate"], to_come, statistics.variance / statistics.gg)
        return Step(torch.where(spread(live), moved, weights), kept, trace)

    def averaged(self, state: State) -> Tensor:
        return state["average"]

    def _noise(self, statistics: Statistics) -> Tensor:
        """V̂, by which an alignment is judged. One sample shows no spread: then all of the gradient may be noise."""
        return statistics.variance if self.batch > 1 else statistics.gg

    def _travels(self, state: State, statistics: Statistics, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The averages of <g_t, u_{t-1}> and of its square, (K, L), and whether the weights of a run travel, (K, 1)."""
        age = state["age"]
        now = statistics.gm / (1 - state["left"])
        aligned = MOMENTUM * state["alignment"] + (1 - MOMENTUM) * now
        begun = live & (age > 0)  # there is no estimate at first
        aligned = torch.where(begun, aligned, state["alignment"])
        squares = torch.where(begun, _smooth(state["usual"], now.square()), state["usual"])
        correction = 1 - state["momentum_power"]
        steady, lasting = aligned / correction, torch.minimum(aligned, state["alignment"]) / correction
        noise = state["noise"] / (1 - state["smoothing_power"])  # before this step
        usual = (state["usual"] / (1 - state["smoothing_power"] / SMOOTHING)).sqrt()  # the first step had none
        beyond_noise = self._mean_ratio(steady, noise, live & (age > FIRST)) > STEADY
        return aligned, squares, beyond_noise | (self._mean_ratio(lasting, usual, live & (age > USUAL)) > 1)

    def _mean_ratio(self, above: Tensor, below: Tensor, known: Tensor) -> Tensor:
        """The mean over the tensors of a run of which both are known, (K, 1)."""
        known = known & (below > 0)
        ratio = torch.where(known, above / below, 0.0)
        total = ratio[:, :1]
        for tensor in range(1, len(self.layout.sizes)):  # one by one: the order never depends on the other runs
            total = total + ratio[:, tensor : tensor + 1]
        return total / known.sum(1, keepdim=True).clamp_min(1)

    def _signal(self, noise: Tensor, whole: Tensor, live: Tensor) -> Tensor:
        """s, the share of signal in the gradients of this step, (K, 1); of one sample nothing is known."""
        if self.batch == 1:
            return torch.full_like(noise[:, :1], ENOUGH)
        return self._mean_ratio((whole - noise).maximum(WORST * whole), whole, live)

    def _momentum(self, state: State, count: Tensor, age: Tensor) -> Tensor:
        """β of the n-th step since the data changed, the t-th altogether."""
        return LIGHT + (MOMENTUM - LIGHT) * (count / age)

    def _reach(self, beta: Tensor) -> Tensor:
        """What keeps noise from carrying the weights further, or less far, than with β = MOMENTUM."""
        return ((1 - beta) / (1 + beta) * ((1 + MOMENTUM) / (1 - MOMENTUM))).sqrt()

    def _ratio(self, count: Tensor, age: Tensor, share: Tensor) -> Tensor:
        """ρ."""
        root = share.clamp_min(0).sqrt()
        largest = torch.minimum(DECAY / age.sqrt(), SIGNAL * root**3).clamp(LARGEST, EARLY)
        # one bound at a time: research puts a tensor in a constant's place, which clamp() takes beside no number
        less = (root / ENOUGH**0.5).clamp_max(1).clamp_min(LEAST)
        more = (root / CLEAR**0.5).clamp_min(1).clamp_max(MOST)
        decay = DECAY * less * more
        return torch.minimum(decay / count.clamp_min(1).sqrt(), largest) * (age / WARM_UP).clamp_max(1)

    def _bounded(self, weights: Tensor, start: Tensor) -> Tensor:
        """|w|, between its bounds; both arguments are squares."""
        least = FLOOR**2 * self.layout.elements.to(weights.dtype)
        known = self.images > 0  # not if all are zero
        power = min(max(0, round(math.log2(SMALL**2 / self.images) / 2)), ENLARGED) if known else 0
        if power:
            least = least.expand_as(start).clone()
            least[:, 0] = 4**power * torch.maximum(start, least)[:, 0]  # the first tensor takes the images
        return torch.minimum(torch.maximum(weights, least), GROWTH**2 * torch.maximum(start, least)).sqrt()


def _smooth(average: Tensor, value: Tensor) -> Tensor:
    return SMOOTHING * average + (1 - SMOOTHING) * value
