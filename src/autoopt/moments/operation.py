"""What a layer family must say so that its parameters can be observed.

Note [contributions]: c_i is what sample i, row i of the layer's input, adds to `.grad`; g = Σ_i c_i. A rule returns, in
one pass over the activations, the gradient Σ_i c_i and the second moment Σ_i c_i². Nothing about the loss is needed,
and BatchNorm is well defined: the output gradient that reaches row i already holds what the other rows did to it.
"""

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
# The kernels agree with their twins in Triton's interpreter but have not been measured on a GPU yet: on request only.
TRITON = os.environ.get("AUTOOPT_TRITON") == "1" and importlib.util.find_spec("triton") is not None


Contributions = Callable[[slice], Tensor]
"""Some of the samples -> what each of them adds to a parameter, (samples, *shape of the parameter)."""


class Moments(NamedTuple):
    """Sums over the samples of their contributions c_i to one parameter."""

    gradient: Tensor  # Σ_i c_i, shape of the parameter
    square: Tensor  # Σ_i c_i² elementwise, or its total as a 0-dim tensor


class Products(NamedTuple):
    """c[o, i, tap] = Σ_t δ[o, t] a[i, t at the tap] of a convolution (or of an image of one row), for a kernel."""

    left: Tensor  # δ, (samples, outputs, rows, columns)
    right: Tensor  # a, (samples, inputs, rows, columns)
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    bias: int = 1  # 1: it is what is summed on the left, 2: on the right


class Positions(NamedTuple):
    """c[k] = Σ_t δ[k, t] x̂[k, t] with x̂ = (x - mean) rstd, for a kernel; that of the bias is Σ_t δ[k, t]."""

    dy: Tensor  # (samples, channels, positions)
    x: Tensor
    mean: Tensor | None  # None: x̂ = x rstd
    rstd: Tensor
    per_group: int  # channels that share them
    strides: tuple[int, int, int]  # of both, of (sample, position, group)


class Operation(ABC):
    """A layer with its constants bound: forward, and from the gradient of its output all that backward needs.

    Where the contributions are small, they are all that a layer family has to give; the others say how to get the
    gradient and the moments without them.
    """

    lowers: ClassVar[bool] = False  # autocast runs this operation in its lower precision
    keeps_input: ClassVar[bool] = False  # `kept` is the input and nothing else
    positional: ClassVar[bool] = False  # takes any axes between that of the samples and those of the features

    @property
    def kind(self) -> object:
        """What is equal where the contributions of two layers come about alike, so that they can be formed together."""
        return self

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output, and the tensors that the methods below take as `kept`."""

    @abstractmethod
    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        """The gradient with respect to x."""

    @abstractmethod
    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """c_i of the weight, (samples, *shape of the weight)."""

    def bias_contributions(self, dy: Tensor) -> Tensor:
        """c_i of the bias, (samples, *shape of the bias)."""
        raise AssertionError(f"{type(self).__name__} has no bias")

    def select(self, kept: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
        """What was kept of some samples."""
        return tuple(tensor[rows] for tensor in kept)

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Products | Positions | None:
        """How a kernel finds the contributions of one sample, in `dy` and `kept` as they lie; None: none does."""
        return None

    def weight_use(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Contributions:
        """`weight_contributions`, to be asked for a few samples at a time."""
        return lambda rows: self.weight_contributions(dy[rows], self.select(kept, rows))

    def forms(self, x: Tensor) -> bool:
        """Whether the second moment of the weight takes more than its gradient, since every c_i has to be formed."""
        return True

    def gradients(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Those with respect to x, unless there is no `weight` to have it from, and to the weight."""
        return None if weight is None else self.input_gradient(dy, kept, weight), self.weight_gradient(dy, kept)

    def weight_gradient(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """Σ_i c_i of the weight."""
        return self.weight_contributions(dy, kept).sum(0)

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        """The moments of the weight; `total` asks for the sum of the squares only."""
        return moments(self.weight_contributions(dy, kept), total)

    def weight_square(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Tensor:
        """The second of them alone."""
        return self.weight_moments(dy, kept, total).square

    def bias_moments(self, dy: Tensor, total: bool) -> Moments:
        """The moments of the bias."""
        return moments(self.bias_contributions(dy), total)


def alike(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether its elements lie in memory as those of a tensor of the same shape with these strides."""
    return all(
        one == other or size == 1 for one, other, size in zip(tensor.stride(), strides, tensor.shape, strict=True)
    )


def owned(output: Tensor) -> Tensor:
    """An output that autograd takes for no view, where nobody else holds its base: it may be changed in place."""
    fresh: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
    return fresh


def by_feature(x: Tensor, features: int) -> Tensor | None:
    """(samples, *positions, *features) -> (samples, features, positions), if that takes no copy."""
    each = x.shape[x.dim() - features :].numel()
    seen = viewed(x, (x.shape[0], x.shape[:-features].numel() // max(1, x.shape[0]), each))
    return None if seen is None else seen.mT


def viewed(x: Tensor, shape: Sequence[int]) -> Tensor | None:
    """The same elements in another shape; None: that takes a copy."""
    try:
        return x.view(shape)
    except RuntimeError:
        return None


def precision(x: Tensor) -> torch.dtype:
    """What squares are kept in: never half."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in the precision that squares are taken in."""
    return x.float() if x.dtype in HALF else x


def fused(x: Tensor) -> bool:
    """Whether a kernel in `triton` may do what otherwise takes several operations; a compiler does so by itself."""
    return TRITON and x.is_cuda and x.dtype != torch.float64 and not torch.compiler.is_compiling()


def moments(contributions: Tensor, total: bool, *, consume: bool = False) -> Moments:
    """The moments of contributions that are there one by one, (samples, *shape of the parameter).

    `consume`: the contributions are not needed any more, and may be squared where they are.
    """
    gradient, c = contributions.sum(0), wide(contributions)
    if total:
        flat = c.flatten()
        return Moments(gradient, flat.dot(flat))
    return Moments(gradient, (c.square_() if consume else c.square()).sum(0))
