"""Which samples are looked at, where to look at all of them would cost more than the backward pass itself.

Most layers give Σ_i c_i² of the whole batch for little. Convolutions, and linear layers over positions, have to form
the contribution of each sample, as large as the weight, only to square it. So, unless all are asked for, they look at a
few samples where all would not fit into a small room. These are evenly spaced: in a batch of random order they are as
good as any, so that N/m times the sum over the m is an unbiased estimate of the sum over all. The choice depends on
nothing but sizes, so that a run that is resumed, or skips a step, looks at the samples it would have looked at.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from autoopt.moments import Moments, Operation, wide

CPU_ROOM, GPU_ROOM = 1 << 18, 1 << 22  # elements: formed and squared in a small part of a backward pass
FEW = 2  # samples; the rule averages over a hundred steps


class Some(NamedTuple):
    """Some of the samples."""

    rows: slice
    number: int
    share: float  # N/m: how many samples each of them stands for


class Sampler:
    """The choice of samples; `exact` looks at all."""

    def __init__(self, exact: bool = True) -> None:
        self.exact = exact

    def choose(self, samples: int, each: int, device: torch.device) -> Some | None:
        """Those to look at, where one takes so many elements; None: all of them."""
        room = CPU_ROOM if device.type == "cpu" else GPU_ROOM
        if self.exact or samples <= FEW or samples * each <= room:
            return None
        stride = -(-samples // FEW)
        first = (stride - 1) // 2
        number = -(-(samples - first) // stride)
        return Some(slice(first, samples, stride), number, samples / number)

    def moments(
        self, operation: Operation, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor | None, total: bool
    ) -> tuple[Tensor | None, Moments]:
        """The gradient of the input (where there is a `weight` to have it from), and the moments of the weight."""
        some = self.choose(len(dy), operation.each(dy, kept), dy.device)
        if some is None:
            dx = None if weight is None else operation.input_gradient(dy, kept, weight)
            return dx, operation.weight_moments(dy, kept, total)
        dx, dw = operation.gradients(dy, kept, weight)
        starts = range(some.rows.start, len(dy), some.rows.step)
        squares = [_square(operation, dy, kept, slice(start, start + 1), total) for start in starts]
        return dx, Moments(dw, functools.reduce(torch.add, squares) * some.share)


def _square(operation: Operation, dy: Tensor, kept: tuple[Tensor, ...], one: slice, total: bool) -> Tensor:
    """c² of one sample: the gradient of a batch of one, by torch's own kernels."""
    c = wide(operation.weight_gradient(dy[one], operation.select(kept, one)))
    return c.flatten().dot(c.flatten()) if total else c.square()
