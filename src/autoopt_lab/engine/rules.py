"""Optimizers for K runs side by side: pure functions on flat (K, D) tensors.

To add a rule: subclass `Rule`, name its options with their defaults, give it a starting state and a step, and add it to
`registry.RULES`. Options arrive as (K, 1) tensors, one value per run. A step keeps all in `state`, a dict of tensors
whose first axis is the run; statistics per tensor are (K, L), by `self.layout.total` and `.spread`.

Only operations that round once (+ - * / sqrt, comparisons, where) and `layout.total` belong in a step: a fused
multiply-add or a power may round differently with the position in the buffer, and a run would depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from autoopt_lab.engine.layout import Layout

State = dict[str, Tensor]


class Trace(NamedTuple):
    """What an automatic rule chose, (K, L) each; noise is V / |g|^2 of this step in the rule's metric."""

    rate: Tensor
    momentum: Tensor
    noise: Tensor


class Step(NamedTuple):
    weights: Tensor
    state: State
    trace: Trace | None = None


class Metric:
    """The diagonal Hessian estimate of Table 1, h; None stands for ones."""

    options: ClassVar[Mapping[str, float]] = {}
    corrected: ClassVar[bool] = False  # whether h carries the factor 1 - beta^t of eq. Hessian_Adam

    def start(self, weights: Tensor) -> State:
        del weights
        return {}

    def next(self, state: State, gradient: Tensor, option: Mapping[str, Tensor]) -> tuple[State, Tensor | None]:
        del state, gradient, option
        return {}, None


class Identity(Metric):
    """SGD."""


class AdamMetric(Metric):
    options: ClassVar[Mapping[str, float]] = {"beta2": 0.99, "eps": 1e-8}
    corrected = True

    def start(self, weights: Tensor) -> State:
        return {"square": torch.zeros_like(weights), "beta2_power": torch.ones_like(weights[:, :1])}

    def next(self, state: State, gradient: Tensor, option: Mapping[str, Tensor]) -> tuple[State, Tensor]:
        beta2 = option["beta2"]
        square = beta2 * state["square"] + (1 - beta2) * (gradient * gradient)
        power = beta2 * state["beta2_power"]  # beta2^t
        return {"square": square, "beta2_power": power}, (square / (1 - power)).sqrt() + option["eps"]


class AdaGradMetric(Metric):
    options: ClassVar[Mapping[str, float]] = {"eps": 1e-10}

    def start(self, weights: Tensor) -> State:
        return {"square": torch.zeros_like(weights)}

    def next(self, state: State, gradient: Tensor, option: Mapping[str, Tensor]) -> tuple[State, Tensor]:
        square = state["square"] + gradient * gradient
        return {"square": square}, square.sqrt() + option["eps"]


def divided(x: Tensor, h: Tensor | None) -> Tensor:
    return x if h is None else x / h


class Rule:
    """One optimizer of a chunk; `second` in `step` is sum_i c_i^2 if `moments`, else empty."""

    options: ClassVar[Mapping[str, float]] = {}
    moments: ClassVar[bool] = False
    images = 1.0  # mean square of what is not zero in them, for rules that ask how large the data is

    def __init__(self, metric: Metric, layout: Layout, batch: int, option: Mapping[str, Tensor]) -> None:
        self.metric = metric
        self.layout = layout
        self.batch = batch  # N
        self.option = option

    def start(self, weights: Tensor) -> State:
        raise NotImplementedError

    def step(self, state: State, weights: Tensor, gradient: Tensor, second: Tensor) -> Step:
        raise NotImplementedError

    def averaged(self, state: State) -> Tensor | None:
        """The average of the weights, (K, D), of a rule that keeps one."""
        del state
        return None


class Plain(Rule):
    """A fixed rate and momentum: m = b m + (1 - b) g, w -= lr m / h; with Adam's metric, m is divided by 1 - b^t."""

    options: ClassVar[Mapping[str, float]] = {"lr": 0.01, "momentum": 0.0}

    def start(self, weights: Tensor) -> State:
        state = {"average": torch.zeros_like(weights), **self.metric.start(weights)}
        if self.metric.corrected:
            state["beta_power"] = torch.ones_like(weights[:, :1])
        return state

    def step(self, state: State, weights: Tensor, gradient: Tensor, second: Tensor) -> Step:
        del second
        metric_state, h = self.metric.next(state, gradient, self.option)
        beta = self.option["momentum"]
        average = beta * state["average"] + (1 - beta) * gradient
        new = {"average": average, **metric_state}
        direction = divided(average, h)
        if self.metric.corrected:
            new["beta_power"] = beta * state["beta_power"]
            direction = direction / (1 - new["beta_power"])
        return Step(weights - self.option["lr"] * direction, new)


class PlainWithMomentum(Plain):
    """Adam's default beta1."""

    options: ClassVar[Mapping[str, float]] = {"lr": 0.001, "momentum": 0.9}
