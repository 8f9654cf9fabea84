"""Convolutions in one, two and three dimensions, as matrix products with the unfolded input."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.linear import product_moments
from autoopt.moments.operation import Moments, moments

CHUNK = 1 << 20  # elements of unfolded input held at once: small enough to stay in a CPU's cache
FUNCTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Conv:
    """(samples, in, *space) -> (samples, out, *space)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    lowers = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        convolve = FUNCTION[len(self.kernel)]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        (x,) = kept
        no_output_padding = [0] * len(self.kernel)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            dy, x, weight, None, self.stride, self.padding, self.dilation, False, no_output_padding, self.groups,
            (True, False, False),
        )[0]  # fmt: skip
        return gradient

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        (x,) = kept
        outputs = dy.flatten(2).unflatten(1, (self.groups, -1))  # (samples, groups, out/groups, positions)
        elements = x.shape[1] * outputs.shape[-1] * math.prod(self.kernel)
        size = max(1, CHUNK // elements)
        parts = [
            product_moments(d, self.columns(a).transpose(-1, -2), total)
            for d, a in zip(outputs.split(size), x.split(size), strict=True)
        ]
        gradient, square = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        shape = (dy.shape[1], x.shape[1] // self.groups, *self.kernel)
        return Moments(gradient.view(shape), square if total else square.view(shape))

    def bias_moments(self, dy: Tensor, total: bool) -> Moments:
        return moments(dy.flatten(2).sum(2), total)

    def columns(self, x: Tensor) -> Tensor:
        """The input that each output position saw: (samples, groups, in/groups · kernel, positions).

        A strided view and one copy; `F.unfold` takes several times as long on a CPU and knows two dimensions only.
        """
        dims = len(self.kernel)
        if any(self.padding):
            x = F.pad(x, [p for p in reversed(self.padding) for _ in range(2)])
        for axis, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        space, kernel_axes = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
        x = x.permute(0, 1, *kernel_axes, *space)
        return x.reshape(x.shape[0], self.groups, -1, math.prod(x.shape[2 + dims :]))


def prepare(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> tuple[Conv, Tensor]:
    """The operation of an nn.ConvNd; padding that is not the same zeros on both sides is done beforehand."""
    if x.dim() == len(layer.kernel_size) + 1:
        x = x.unsqueeze(0)
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(layer.kernel_size)
    return Conv(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups), x
