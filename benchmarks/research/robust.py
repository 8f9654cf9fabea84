"""Research: the candidate for rule="robust" in plain torch, R runs side by side (docs/research.md).

Tensors are (R, ...), statistics per tensor (R, L). `Robust.step` takes what a backward pass and the capture deliver:
per tensor the gradient g = Σ_i c_i and Σ_i c_i² (elementwise), and N.
"""

import torch
from torch import Tensor

TINY = 1e-38


def total(x: Tensor) -> Tensor:
    """The sum over everything but the run."""
    return x.flatten(1).sum(1)


def spread(x: Tensor, like: Tensor) -> Tensor:
    """(R,) made to multiply (R, ...)."""
    return x.view(-1, *[1] * (like.dim() - 1))


class Robust:
    """A step relative to |w|, decayed by the steps since the gradient last pointed steadily one way.

    Args:
        weights: the tensors, (R, ...), changed in place.
        metric: "sgd", "adam" or "adagrad", h of the paper's Table 1.
        cap, c: the relative step is at most `cap`, and c/√n.
        warm: steps of linear warm-up.
        threshold: n is halved at every step in which the alignment exceeds this share of V; 0: never.
        unusual: or this many times its own root mean square over the last hundred steps.
        window: the newest weights' share of the average is (window + 1)/(n + window).
        growth: |w| counts at most so many times what it was at the start.
        early, signal: at the start the relative step may exceed `cap`: it is at most `early`, and `signal` times the
            root of the share of signal in the gradient.
        clip: no step is longer than ρ|w|: the size of this very direction counts where it exceeds the mean.
    """

    def __init__(
        self, weights: list[Tensor], metric: str = "sgd", *, cap: float = 0.006, c: float = 0.2, warm: int = 100,
        beta: float = 0.9, threshold: float = 0.3, unusual: float = 1.0, window: float = 4.0, clip: bool = False,
        floor: float = 0.05, growth: float = 2.0, early: float = 0.009, signal: float = 0.02,
    ) -> None:  # fmt: skip
        self.weights, self.metric, self.cap, self.c, self.warm, self.beta = weights, metric, cap, c, warm, beta
        self.threshold, self.unusual, self.window, self.clip = threshold, unusual, window, clip
        self.steps = 0  # t
        self.estimates = [torch.zeros_like(w) for w in weights]  # u
        self.squares = [torch.zeros_like(w) for w in weights] if metric != "sgd" else []
        self.averages = [w.clone() for w in weights]
        self.smallest = floor * torch.tensor([w[0].numel() ** 0.5 for w in weights])
        self.largest = growth * torch.maximum(torch.stack([total(w * w) for w in weights], 1).sqrt(), self.smallest)
        start = weights[0].new_zeros(len(weights[0]), len(weights))
        self.energy, self.noise, self.alignment, self.count = start, start, start, start[:, :1]
        self.usual = start  # mean square of <g,u>
        self.gradient = start  # mean of <g,g>
        self.early, self.signal = early, signal
        self.fired: list[Tensor] = []  # (R,) for every step: whether n was halved

    def metric_of(self, i: int, g: Tensor) -> Tensor | None:
        """h, this step's gradient included."""
        if self.metric == "sgd":
            return None
        square = self.squares[i]
        if self.metric == "adagrad":
            return square.add_(g * g).sqrt().add_(1e-10)
        square.lerp_(g * g, 0.01)
        return (square / (1 - 0.99**self.steps)).sqrt_().add_(1e-8)

    @torch.no_grad()
    def step(self, gradients: list[Tensor], seconds: list[Tensor], samples: int) -> None:
        """One update."""
        self.steps += 1
        directions, columns = [], []
        for i, (w, g, second) in enumerate(zip(self.weights, gradients, seconds, strict=True)):
            h, u = self.metric_of(i, g), self.estimates[i]
            scaled = g if h is None else g / h
            gg, gu = total(g * scaled), total(u * scaled)
            own = total(second if h is None else second / h)
            u.lerp_(g, 1 - self.beta)
            d = u / (1 - self.beta**self.steps)
            d = d if h is None else d.div_(h)
            directions.append(d)
            columns.append([own - gg / samples, gg, gu, total(d * d), total(w * w)])
        deviations, gg, gu, size, norm = (torch.stack(x, 1) for x in zip(*columns, strict=True))
        variance = (deviations * (samples / max(samples - 1, 1))).clamp_min(0)
        self.gradient = 0.99 * self.gradient + 0.01 * gg
        rate, newest = self.decide(variance, gu, size, norm)
        for i, (w, d, average) in enumerate(zip(self.weights, directions, self.averages, strict=True)):
            w.sub_(spread(rate[:, i], w) * d)
            average.add_(spread(newest[:, 0], w) * (w - average))

    def decide(self, variance: Tensor, gu: Tensor, size: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The rate of each tensor (R, L) and the newest weights' share of the average (R, 1)."""
        t = self.steps
        self.count = self.count + 1
        if t > 1:
            unbiased = gu / (1 - self.beta ** (t - 1))  # u before this step, its start at zero corrected
            self.alignment = 0.9 * self.alignment + 0.1 * unbiased
            steady = self.alignment / (1 - 0.9 ** (t - 1))
            noise = self.noise / (1 - 0.99 ** (t - 1))  # V before this step
            moving = (steady / (noise + TINY)).mean(1, keepdim=True) > self.threshold
            usual = (self.usual / (1 - 0.99 ** (t - 2))).sqrt() if t > 2 else self.usual + 1
            if t > 100:  # before, nothing is usual
                moving |= (steady / (usual + TINY)).mean(1, keepdim=True) > self.unusual
            moving &= torch.tensor(self.threshold > 0 and t > 10)
            self.usual = 0.99 * self.usual + 0.01 * unbiased.square()
            self.count = torch.where(moving, self.count / 2, self.count).clamp_min(1)
            self.fired.append(moving[:, 0])
        self.noise = 0.99 * self.noise + 0.01 * variance
        self.energy = 0.99 * self.energy + 0.01 * size
        energy = self.energy / (1 - 0.99**t)
        energy = torch.maximum(energy, size) if self.clip else energy
        share = (1 - self.noise / (self.gradient + TINY)).clamp(0, 1)
        cap = (self.signal * share.sqrt()).clamp_max(min(self.early, self.c / t**0.5)).clamp_min(self.cap)
        ratio = torch.minimum(self.c / self.count.sqrt(), cap) * min(1.0, t / self.warm)  # ρ
        bounded = torch.minimum(torch.maximum(norm.sqrt(), self.smallest), self.largest)
        rate = ratio * bounded / (energy.sqrt() + TINY)
        return rate, ((self.window + 1) / (self.count + self.window)).clamp_max(1)
