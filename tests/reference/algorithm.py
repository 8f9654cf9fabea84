"""Algorithm 1 of the paper, one tensor and one sample at a time, for SGD, Adam and AdaGrad."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def units_of(names: Iterable[str], granularity: str) -> list[list[str]]:
    """Which tensors share one γ: each its own, those of one layer, or all of them."""
    names = list(names)
    if granularity == "tensor":
        return [[name] for name in names]
    if granularity == "group":
        return [names]
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


@dataclass
class Chosen:
    """What the naive run chose for one tensor at its last step."""

    lr: float
    momentum: float
    noise: float


def solve(V: float, G: Tensor, inverse: Tensor) -> tuple[float, float]:
    """γ = A^-1 b with A = G^T Ĥ^-1 G and b = V [1, 1] (eq. oracle_est), or the fallback where γ is not feasible."""
    A = G.T @ (inverse[:, None] * G)
    try:
        first, second = torch.linalg.solve(A, torch.full((2,), V, dtype=torch.float64)).tolist()
    except RuntimeError:  # singular: no ĝ_{t-1} yet, or one parallel to g
        first = second = math.nan
    if 0 <= first <= 0.999 and second >= 0 and second < 1 - first:
        return first, second
    return min(V / A[0, 0].item(), 0.999), 0.0


@dataclass
class _Tensor:
    """State of one tensor: its weight, ĝ_{t-1}, the second moments of the metric."""

    weight: Tensor
    estimate: Tensor
    square: Tensor
    largest: Tensor


class NaiveAuto:
    """AutoSGD ("sgd"), AutoAdam ("adam") and AutoAdaGrad ("adagrad") given the c_i of every tensor."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        kind: str,
        *,
        smoothing: float,
        start: tuple[float, float] = (0.999, 0.0),
        lr: float = 1.0,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        granularity: str = "tensor",
        beta2: float = 0.99,
        eps: float = 1e-8,
        amsgrad: bool = False,
        measure_every: int = 1,
    ) -> None:
        self.kind, self.smoothing, self.lr = kind, smoothing, lr
        self.weight_decay, self.decoupled = weight_decay, decoupled_weight_decay
        self.beta2, self.eps, self.amsgrad = beta2, eps, amsgrad
        self.units = units_of(weights, granularity)
        self.tensors = {}
        for name, weight in weights.items():
            w = weight.detach().double().clone()
            self.tensors[name] = _Tensor(w, torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w))
        self.gamma = [start for _ in self.units]  # γ_E of every unit
        self.beta_product = [1.0 for _ in self.units]  # the product of all β so far, for Adam's first bias correction
        self.steps = [0 for _ in self.units]  # t
        self.every, self.taken = measure_every, 0
        self.spread = [math.nan for _ in self.units]  # V of the last step that measured it
        self.noise = [math.nan for _ in self.units]  # V / <g, g> of that step
        self.tuned: dict[str, Chosen] = {}

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.weight for name, tensor in self.tensors.items()}

    def step(self, contributions: dict[str, Tensor]) -> None:
        for index, unit in enumerate(self.units):
            self._step_unit(index, unit, {name: contributions[name] for name in unit})
        self.taken += 1

    def _step_unit(self, index: int, unit: list[str], contributions: dict[str, Tensor]) -> None:
        gradients = {name: contributions[name].sum(0) for name in unit}
        if all((g == 0).all() for g in gradients.values()):
            return  # nothing to learn from
        self.steps[index] += 1
        if self.weight_decay and not self.decoupled:
            gradients = {name: g + self.weight_decay * self.tensors[name].weight for name, g in gradients.items()}
        metrics = {name: self._metric(self.tensors[name], gradients[name], self.steps[index]) for name in unit}

        inverse = torch.cat([1 / metrics[name].flatten() for name in unit])
        g = torch.cat([gradients[name].flatten() for name in unit])
        estimate = torch.cat([self.tensors[name].estimate.flatten() for name in unit])
        samples = torch.cat([contributions[name].flatten(1) for name in unit], dim=1)
        if self.taken < self.every or self.taken % self.every == 0:
            self.spread[index] = self._variance(samples, inverse)
            raw = samples.sum(0)  # of the gradient itself: decay is no part of what was measured
            self.noise[index] = self.spread[index] / (raw * raw * inverse).sum().item()
        V = self.spread[index]
        new = solve(V, torch.stack([g, g - estimate], dim=1), inverse)

        old, share = self.gamma[index], self.smoothing
        first, second = (1 - share) * new[0] + share * old[0], (1 - share) * new[1] + share * old[1]
        self.gamma[index] = (first, second)
        alpha, beta = 1 - first, second / (1 - first)
        self.beta_product[index] *= beta
        for name in unit:
            self._update(self.tensors[name], gradients[name], metrics[name], index)
            self.tuned[name] = Chosen(self.lr * alpha, beta, self.noise[index])

    def _variance(self, samples: Tensor, inverse: Tensor) -> float:
        """Eq. Vgt_est, with g^(i) = N c_i; weight decay is the same for every sample, so it has no variance."""
        N = samples.shape[0]
        mean = samples.sum(0)
        total = 0.0
        for i in range(N):
            difference = N * samples[i] - mean
            total += (difference * inverse * difference).sum().item()
        return total / (N * (N - 1))

    def _metric(self, tensor: _Tensor, g: Tensor, t: int) -> Tensor:
        """The diagonal of Ĥ_t, Table 1. Adam's factor 1 - β^t does not change γ and comes with the update."""
        if self.kind == "sgd":
            return torch.ones_like(g)
        if self.kind == "adagrad":
            tensor.square = tensor.square + g**2
            return torch.sqrt(tensor.square) + self.eps
        tensor.square = self.beta2 * tensor.square + (1 - self.beta2) * g**2
        tensor.largest = torch.maximum(tensor.largest, tensor.square)
        square = tensor.largest if self.amsgrad else tensor.square
        return torch.sqrt(square / (1 - self.beta2**t)) + self.eps

    def _update(self, tensor: _Tensor, g: Tensor, metric: Tensor, index: int) -> None:
        first, second = self.gamma[index]
        if self.decoupled:
            tensor.weight = tensor.weight * (1 - self.lr * (1 - first) * self.weight_decay)
        tensor.estimate = (1 - first - second) * g + second * tensor.estimate
        if self.kind == "adam":
            metric = metric * (1 - self.beta_product[index])
        tensor.weight = tensor.weight - self.lr * tensor.estimate / metric
