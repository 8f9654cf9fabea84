"""Linear layers: y = x Wᵀ + b over the last axis of x, samples on the first."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.operation import Moments, moments, owned, wide

CHUNK = 1 << 24  # elements of single-sample gradients held at once


@dataclass(frozen=True)
class Linear:
    """(samples, *positions, in) -> (samples, *positions, out)."""

    lowers = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return owned(F.linear(x, weight, bias)), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        return dy @ weight

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        (x,) = kept
        if x.dim() == 2:
            return outer_moments(dy, x, total)
        return product_moments(dy.flatten(1, -2).transpose(1, 2), x.flatten(1, -2), total)

    def bias_moments(self, dy: Tensor, total: bool) -> Moments:
        return moments(dy if dy.dim() == 2 else dy.flatten(1, -2).sum(1), total)


def outer_moments(dy: Tensor, x: Tensor, total: bool) -> Moments:
    """c_i = δ_i a_iᵀ has rank one: c_i² = δ_i² (a_i²)ᵀ, so that no c_i is ever formed."""
    delta2, a2 = wide(dy).square(), wide(x).square()
    square = delta2.sum(1).dot(a2.sum(1)) if total else delta2.T @ a2
    return Moments(dy.T @ x, square)


def product_moments(left: Tensor, right: Tensor, total: bool) -> Moments:
    """c_i = left_i right_i, matrix products over the positions, formed for a few samples at a time."""
    size = max(1, CHUNK // (left.shape[-2] * right.shape[-1]))
    parts = [moments(a @ b, total) for a, b in zip(left.split(size), right.split(size), strict=True)]
    if len(parts) == 1:
        return parts[0]
    return Moments(*(torch.stack(part).sum(0) for part in zip(*parts, strict=True)))


def prepare(layer: nn.Linear, x: Tensor) -> tuple[Linear, Tensor]:
    """The operation of an nn.Linear; a single vector is a batch of one sample."""
    return Linear(), x if x.dim() > 1 else x.unsqueeze(0)
