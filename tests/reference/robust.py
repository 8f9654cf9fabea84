"""rule="robust", one tensor and one sample at a time, in plain numbers; shares nothing with the library."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def decay(share: float) -> float:
    """c, by the share of signal s."""
    less, more = (max(share, 0) / 0.03) ** 0.5, (max(share, 0) / 0.15) ** 0.5
    return 0.2 * max(0.5, min(1, less)) * max(1, min(1.5, more))


def relative_step(count: float, age: int, share: float) -> float:
    """ρ, n steps after the last shift and t altogether."""
    largest = max(0.006, min(0.009, 0.2 / age**0.5, 0.06 * max(share, 0) ** 1.5))
    return min(largest, decay(share) / max(count, 1) ** 0.5) * min(1, age / 100)


def momentum(count: float, age: int) -> float:
    """β, the same: 0.85 right after a shift, 0.9 if there was none."""
    return 0.85 + 0.05 * count / age


def reach(beta: float) -> float:
    """The part of a step that leads noise as far as a whole one with β = 0.9."""
    return ((1 - beta) / (1 + beta) / (0.1 / 1.9)) ** 0.5


class NaiveRobust:
    """The tensors of a model under the robust rule, given their c_i. `metric` is "sgd", "adam" or "adagrad"."""

    def __init__(
        self, weights: dict[str, Tensor], metric: str, measure_every: int = 1, inputs: dict[str, float] | None = None
    ) -> None:
        self.every, self.taken = measure_every, 0
        inputs = inputs or {}  # root mean square of the data that a weight takes
        self.tensors = {name: _Tensor(weight, metric, inputs.get(name, 1.0)) for name, weight in weights.items()}
        self.count = 0.0  # n
        self.counts: list[float] = []  # after each step

    def step(self, contributions: dict[str, Tensor]) -> None:
        self.count += 1
        tensors = [(self.tensors[name], c) for name, c in contributions.items()]
        measures = self.taken < self.every or self.taken % self.every == 0
        looks = [tensor.look(c, measures, self.count) for tensor, c in tensors]
        for limit, ratios in zip((0.3, 1.0), zip(*looks, strict=True), strict=True):
            known = [ratio for ratio in ratios if ratio is not None]
            if known and sum(known) / len(known) > limit:
                self.count /= 2
                break
        shares = [share for share in (tensor.share() for tensor, _ in tensors) if share is not None]
        share = sum(shares) / len(shares) if shares else 0.03
        self.decay = decay(share)
        for tensor, _ in tensors:
            tensor.move(self.count, share)
        self.counts.append(self.count)
        self.taken += 1


class _Tensor:
    def __init__(self, weight: Tensor, metric: str, inputs: float) -> None:
        self.weight = weight.detach().double().clone()
        self.average = self.weight.clone()
        enlarged = 2 ** max(0, round(math.log2(0.5 / inputs)))
        self.least = 0.05 * self.weight.numel() ** 0.5
        self.start = max((self.weight**2).sum().item() ** 0.5, self.least)
        if enlarged > 1:
            self.start = self.least = enlarged * self.start
        self.metric = metric
        self.estimate = torch.zeros_like(self.weight)
        self.square = torch.zeros_like(self.weight)
        self.t = 0
        self.beta, self.left = 0.9, 1.0  # of the last step, and the product of all
        self.sizes: list[float] = []  # |d|² of every step
        self.gradients: list[float] = []  # <g, g> of every step with a spread, of all while none had one
        self.variances: list[float] = []  # V̂ of every step with a spread
        self.alignments: list[float] = []  # <g, u> of every step but the first
        self.rate = 0.0

    def look(self, contributions: Tensor, measures: bool, count: float) -> tuple[float | None, float | None]:
        """Take the gradient in; the alignment over the noise and over what was usual, where these are known."""
        N, g = len(contributions), contributions.sum(0)
        h = self.h = self._next_metric(g)
        noise = recent(self.variances) if self.variances else recent(self.gradients)
        usual = recent(a * a for a in self.alignments) ** 0.5
        if self.t > 0:
            self.alignments.append((g * self.estimate / h).sum().item() / (1 - self.left))
        aligned, before = recent(self.alignments, 0.9), recent(self.alignments[:-1], 0.9)
        lasting = min(aligned, before * (1 - 0.9 ** (self.t - 1)) / (1 - 0.9**self.t)) if self.t > 100 else None
        ratios = aligned / noise if self.t > 10 and noise > 0 else None, None if lasting is None else lasting / usual
        if not measures:
            self.variances += self.variances[-1:]  # the last V̂ again
        elif N > 1:
            spread = sum((((c - g / N) ** 2) / h).sum().item() for c in contributions)
            if not self.variances:
                self.gradients = []  # those of batches without a spread
            self.variances.append(N / (N - 1) * spread)  # V̂ of g = Σ c_i
        if N > 1 or not measures or not self.variances:
            self.gradients.append((g * g / h).sum().item())
        self.t += 1
        self.beta = momentum(count, self.t)
        self.left *= self.beta
        self.estimate = self.beta * self.estimate + (1 - self.beta) * g
        return ratios

    def share(self) -> float | None:
        """Of signal in the gradient, where a spread was ever seen."""
        return max(-1, 1 - recent(self.variances) / recent(self.gradients)) if self.variances else None

    def move(self, count: float, share: float) -> None:
        d = self.estimate / (1 - self.left) / self.h
        self.sizes.append((d * d).sum().item())
        length = min(max((self.weight**2).sum().item() ** 0.5, self.least), 2 * self.start)
        size = max(recent(self.sizes), self.sizes[-1] / 1.6**2) ** 0.5
        self.rate = relative_step(count, self.t, share) * reach(self.beta) * length / size
        self.weight = self.weight - self.rate * d
        newest = 5 / (max(count, 1) + 4)
        self.average = (1 - newest) * self.average + newest * self.weight

    def _next_metric(self, g: Tensor) -> Tensor:
        if self.metric == "sgd":
            return torch.ones_like(g)
        if self.metric == "adagrad":
            self.square = self.square + g * g
            return self.square.sqrt() + 1e-10
        self.square = 0.99 * self.square + 0.01 * g * g
        return (self.square / (1 - 0.99 ** (self.t + 1))).sqrt() + 1e-8


def recent(values: Iterable[float], decay: float = 0.99) -> float:
    """The average with weights that fall by `decay` with every step of age."""
    above = below = 0.0
    for value in values:
        above, below = decay * above + value, decay * below + 1
    return above / below if below else 0.0
