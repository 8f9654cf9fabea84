"""Convolutions in one, two and three dimensions: a product over positions with the window that each position saw."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.operation import Moments, Operation, Products
from autoopt.moments.product import added, chunk, gram, gram_pays, gram_total, in_parts, in_tiles, of_each, product

WIDE = 16  # rows of a matrix that are enough for a fast product
FUNCTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Conv(Operation):
    """(samples, in, *space) -> (samples, out, *space)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    lowers = True
    keeps_input = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        convolve = FUNCTION[len(self.kernel)]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        return self._backward(dy, kept[0], weight, (True, False, False))[0]

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        (x,) = kept
        shape = self._shape(dy, x)
        if total and self.groups == 1 and self._gram_pays(dy, x, math.prod(shape)):
            return Moments(
                self.weight_gradient(dy, kept), gram_total(gram(dy.flatten(2).mT), self._window_gram(x, dy.shape[2:]))
            )
        if in_tiles(x) and self.groups == 1 and len(self.kernel) <= 2:
            return self._in_tiles(dy, x, total)
        return self._one_by_one(dy, x, shape, total)

    def gradients(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor | None, Tensor]:
        if weight is None:
            return None, self.weight_gradient(dy, kept)
        return self._backward(dy, kept[0], weight, (True, True, False))[:2]

    def weight_gradient(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        (x,) = kept
        return self._backward(dy, x, x.new_empty(self._shape(dy, x)), (False, True, False))[1]

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        (x,) = kept
        delta = dy.flatten(2).unflatten(1, (self.groups, -1))
        parts = [product(d, self.columns(a).mT) for d, a in in_parts(self._at_a_time(dy, x), delta, x)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1, *self._shape(dy, x))

    def bias_contributions(self, dy: Tensor) -> Tensor:
        return dy.flatten(2).sum(2)

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Products | None:
        if self.groups > 1 or len(self.kernel) > 2:
            return None
        if len(self.kernel) == 2:
            return Products(dy, kept[0], self.kernel, self.stride, self.padding, self.dilation)
        sizes = (1, *self.kernel), (1, *self.stride), (0, *self.padding), (1, *self.dilation)
        return Products(dy.unsqueeze(2), kept[0].unsqueeze(2), *sizes)

    def columns(self, x: Tensor, first: int = 0) -> Tensor:
        """The window that each position saw: (samples, groups, in/groups · kernel, positions).

        A strided view and one copy; `F.unfold` takes several times as long on a CPU and knows two dimensions only. With
        `first` = 1 the first axis of space is left as it is, and the windows are those of one row of the kernel.
        """
        x, dims = self._padded(x), len(self.kernel)
        for axis in range(first, dims):
            reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            x = x.unfold(2 + axis, reach, self.stride[axis])[..., :: self.dilation[axis]]
        space, kernel_axes = range(2, 2 + dims), range(2 + dims, x.dim())
        x = x.permute(0, 1, *kernel_axes, *space)
        return x.reshape(x.shape[0], self.groups, -1, math.prod(x.shape[x.dim() - dims :]))

    def _one_by_one(self, dy: Tensor, x: Tensor, shape: tuple[int, ...], total: bool) -> Moments:
        delta = dy.flatten(2).unflatten(1, (self.groups, -1))  # (samples, groups, out/groups, positions)
        by_row = self._by_row(shape)
        moments_of = self._by_kernel_row if by_row else self._at_once
        parts = in_parts(self._at_a_time(dy, x, by_row), delta, x)
        gradient, square = added(moments_of(d, a, dy.shape[2], total) for d, a in parts)
        if by_row:
            rows = (self.kernel[0], *shape[:2], *shape[3:])
            gradient = gradient.view(rows).movedim(0, 2)
            square = square if total else square.view(rows).movedim(0, 2)
        return Moments(gradient.reshape(shape), square if total else square.reshape(shape))

    def _shape(self, dy: Tensor, x: Tensor) -> tuple[int, ...]:
        """That of the weight."""
        return dy.shape[1], x.shape[1] // self.groups, *self.kernel

    def _by_row(self, shape: tuple[int, ...]) -> bool:
        """Whether c_i are formed for one row of the kernel after the other."""
        return self.stride[0] == 1 and math.prod(shape[1:]) >= WIDE * self.kernel[0]

    def _at_a_time(self, dy: Tensor, x: Tensor, by_row: bool = False) -> int:
        """How many samples' windows and contributions may be held."""
        return max(1, chunk(x.device) // self._each(dy, x, by_row))

    def _each(self, dy: Tensor, x: Tensor, by_row: bool) -> int:
        """Elements of a sample's windows or contributions; by rows of the kernel these are of one row."""
        rows = x.shape[2] + 2 * self.padding[0] if by_row else dy.shape[2] * self.kernel[0]
        windows = x.shape[1] * rows * math.prod(dy.shape[3:]) * math.prod(self.kernel[1:])
        return max(windows, math.prod(self._shape(dy, x)) // (self.kernel[0] if by_row else 1))

    def _at_once(self, delta: Tensor, x: Tensor, height: int, total: bool) -> Moments:
        return of_each(product(delta, self.columns(x).mT), total)

    def _by_kernel_row(self, delta: Tensor, x: Tensor, height: int, total: bool) -> Moments:
        """One row of the kernel after the other: they all saw slices of the same windows, which need no copies."""
        seen, positions = self.columns(x, 1).mT, delta.shape[3]
        step = self.dilation[0] * (positions // height)
        starts = [row * step for row in range(self.kernel[0])]
        rows = [of_each(product(delta, seen[:, :, start : start + positions]), total) for start in starts]
        gradient, square = (torch.stack(part) for part in zip(*rows, strict=True))
        return Moments(gradient, square.sum() if total else square)

    def _in_tiles(self, dy: Tensor, x: Tensor, total: bool) -> Moments:
        from autoopt.moments import triton

        if len(self.kernel) == 2:
            return triton.weight_moments(dy, x, total, self.kernel, self.stride, self.padding, self.dilation)
        gradient, square = triton.weight_moments(  # an image of one row
            dy.unsqueeze(2), x.unsqueeze(2), total,
            (1, *self.kernel), (1, *self.stride), (0, *self.padding), (1, *self.dilation),
        )  # fmt: skip
        return Moments(gradient.squeeze(2), square if total else square.squeeze(2))

    def _window_gram(self, x: Tensor, space: torch.Size) -> Tensor:
        """Inner products of the windows of all pairs of output positions, (samples, *space, *space).

        Those of the input's points hold them all: a pair of windows is summed over the taps, which step through both
        together. So no window is copied out.
        """
        x = self._padded(x)
        points = gram(x.flatten(2).mT)
        steps = [math.prod(x.shape[axis + 1 :]) for axis in range(2, x.dim())]  # of one point, in each dimension
        across = points.shape[1]
        position = [step * s for step, s in zip(steps, self.stride, strict=True)]
        tap = [step * d * (across + 1) for step, d in zip(steps, self.dilation, strict=True)]
        pairs = points.as_strided(
            (x.shape[0], *space, *space, *self.kernel),
            (points.stride(0), *(across * step for step in position), *position, *tap),
        )
        return pairs.sum(tuple(range(-len(self.kernel), 0)))

    def _gram_pays(self, dy: Tensor, x: Tensor, weight: int) -> bool:
        points = math.prod([size + 2 * p for size, p in zip(x.shape[2:], self.padding, strict=True)])
        pairs = math.prod(dy.shape[2:]) ** 2
        return gram_pays(pairs * dy.shape[1] + points**2 * x.shape[1], weight, math.prod(self.kernel) * pairs)

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, [p for p in reversed(self.padding) for _ in range(2)]) if any(self.padding) else x

    def _backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            dy, x, weight, None, self.stride, self.padding, self.dilation, False, [0] * len(self.kernel), self.groups,
            wanted,
        )  # fmt: skip
        return gradients


@dataclass(frozen=True)
class ConvTranspose(Operation):
    """(samples, in, *space) -> (samples, out, *space): the convolution `conv` from its output back to its input.

    So its weight is that convolution's, and so are the moments, with the parts of input and output gradient exchanged.
    """

    conv: Conv
    output_padding: tuple[int, ...]

    lowers = True
    keeps_input = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        conv, convolve = self.conv, TRANSPOSED[len(self.output_padding)]
        y = convolve(x, weight, bias, conv.stride, conv.padding, self.output_padding, conv.groups, conv.dilation)
        return y, (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        conv, image = self._image(dy)
        return conv.forward(image, weight, None)[0]

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        conv, image = self._image(dy)
        return conv.weight_moments(kept[0], (image,), total)

    def weight_gradient(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        conv, image = self._image(dy)
        return conv.weight_gradient(kept[0], (image,))

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        conv, image = self._image(dy)
        return conv.weight_contributions(kept[0], (image,))

    def bias_contributions(self, dy: Tensor) -> Tensor:
        return self.conv.bias_contributions(dy)

    def _image(self, dy: Tensor) -> tuple[Conv, Tensor]:
        """The convolution from dy's space to x's: output padding is what its own padding lacks at the end."""
        if not any(self.output_padding):
            return self.conv, dy
        sides = reversed(list(zip(self.conv.padding, self.output_padding, strict=True)))
        image = F.pad(dy, [side for p, extra in sides for side in (p, p - extra)])
        return replace(self.conv, padding=(0,) * len(self.output_padding)), image


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


def prepare_transpose(
    layer: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, x: Tensor
) -> tuple[ConvTranspose, Tensor]:
    """The operation of an nn.ConvTransposeNd."""
    x = x.unsqueeze(0) if x.dim() == len(layer.kernel_size) + 1 else x
    assert not isinstance(layer.padding, str)
    conv = Conv(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    return ConvTranspose(conv, layer.output_padding), x
