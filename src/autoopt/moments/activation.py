"""Activations with weights of their own."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoopt.moments.norm import by_channel, per_channel
from autoopt.moments.operation import Operation


@dataclass(frozen=True)
class PReLU(Operation):
    """(samples, channels, *space), y = x where it is positive, else weight · x: one weight, or one for each channel."""

    single: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return torch.prelu(x, weight.to(x.dtype)), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        x = kept[0]
        slope = weight if self.single else per_channel(weight, x)
        return torch.where(x > 0, dy, (slope * dy).to(dy.dtype))

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        (x,) = kept
        parts = dy * x.clamp(max=0)
        return parts.reshape(len(parts), -1).sum(1, keepdim=True) if self.single else by_channel(parts)


def prepare(layer: nn.PReLU, x: Tensor) -> tuple[PReLU, Tensor]:
    """The operation of an nn.PReLU; a single number is a batch of one sample."""
    return PReLU(layer.weight.numel() == 1), x if x.dim() > 0 else x.unsqueeze(0)
