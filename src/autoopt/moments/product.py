"""Contributions that are matrix products over positions, c_i = Σ_t δ_it a_itᵀ: what a linear or convolution weight has.

Three exact ways:

- one by one: form c_i for a few samples at a time, square, add up. Any device, elementwise or in total.
- Gram: Σ c_i² in total is Σ_ts (δ_t·δ_s)(a_t·a_s), which forms no c_i. Few positions, large weights.
- fused: a Triton kernel that keeps a tile of c_i in registers. Half precision on CUDA, where c_i would fill the memory.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoopt.moments.operation import HALF, TRITON, Contributions, Moments, fused, moments, wide

CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 26  # elements held at once: what fits into a cache; what fills a GPU
BALANCE = 64  # multiplications that cost as much as the traffic of one element of c_i
LONG = 512  # positions, from which on c_i costs more to compute than to write and read again


def chunk(device: torch.device) -> int:
    """How many elements, of c_i or of what they are made of, a rule may hold at once."""
    return CPU_CHUNK if device.type == "cpu" else GPU_CHUNK


@dataclass(frozen=True)
class Product:
    """The contributions c_i = Σ_t δ_it a_itᵀ, which need not be formed to be joined with others, or for their total."""

    delta: Tensor  # (samples, positions, out)
    a: Tensor  # (samples, positions, in)

    def __call__(self, rows: slice) -> Tensor:
        return product(self.delta[rows].mT, self.a[rows])

    def of(self, rows: slice) -> "Product":
        """The contributions of some samples alone."""
        return Product(self.delta[rows], self.a[rows])

    def gradient(self) -> Tensor:
        """Σ_i c_i."""
        delta, a = self.delta, self.a
        if delta.stride(0) < delta.stride(1):  # time comes first in memory, so that this order needs no copy
            delta, a = delta.transpose(0, 1), a.transpose(0, 1)
        return delta.flatten(0, 1).T @ a.flatten(0, 1)

    def gram_pays(self) -> bool:
        """Whether `total` costs less than the contributions."""
        positions, outputs, inputs = *self.delta.shape[1:], self.a.shape[2]
        return gram_pays(positions**2 * (outputs + inputs), outputs * inputs)

    def total(self) -> Tensor:
        """Σ_i c_i² in total, by the Gram form."""
        return gram_total(gram(self.delta), gram(self.a))


def joined(uses: Sequence[Contributions]) -> list[Contributions]:
    """The same contributions by fewer uses: a sum of products is one product, over the positions of all of them."""
    products = [use for use in uses if isinstance(use, Product)]
    if len(products) < 2:
        return list(uses)
    one = Product(torch.cat([use.delta for use in products], 1), torch.cat([use.a for use in products], 1))
    return [one, *(use for use in uses if not isinstance(use, Product))]


def product_moments(delta: Tensor, a: Tensor, total: bool) -> Moments:
    """The moments from (samples, ..., positions, out) and (samples, ..., positions, in), one by one."""
    size = max(1, chunk(a.device) // (math.prod(delta.shape[1:-2]) * delta.shape[-1] * a.shape[-1]))
    return added(of_each(product(d.mT, part), total) for d, part in in_parts(size, delta, a))


def in_parts(size: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """So many samples of each at a time."""
    if len(tensors[0]) <= size:
        return [tensors]
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def of_each(contributions: Tensor, total: bool) -> Moments:
    """`moments` of contributions that nobody else holds, in one reading where a kernel can."""
    if not fused(contributions):
        return moments(contributions, total, consume=True)
    from autoopt.moments import triton

    return triton.reduce(contributions, total)


def added(parts: Iterable[Moments]) -> Moments:
    """The moments of all samples from those of some at a time."""
    one_by_one = iter(parts)  # never all of them at once
    gradient, square = next(one_by_one)
    for part in one_by_one:
        gradient += part.gradient
        square += part.square
    return Moments(gradient, square)


def gram_pays(multiplications: int, weight: int, gathered: int = 0) -> bool:
    """Whether a sample's Gram form, so many multiplications and elements gathered, costs less than its c_i."""
    return multiplications <= BALANCE * (weight - gathered)


def gram_total(delta_gram: Tensor, a_gram: Tensor) -> Tensor:
    """Σ_i |c_i|² from the Gram matrices over positions, (samples, positions, positions) each."""
    return delta_gram.flatten().dot(a_gram.flatten())


def product(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix product, in float32 where a GPU can give it from half precision for nothing."""
    if left.is_cuda and left.dtype in HALF:
        flat = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
        return flat.view(*left.shape[:-1], right.shape[-1])
    return torch.matmul(left, right)


def gram(rows: Tensor) -> Tensor:
    """(samples, positions, features) -> the inner products of all pairs of positions, never in half precision."""
    return product(rows, rows.mT) if rows.is_cuda else wide(rows) @ wide(rows).mT


def in_tiles(x: Tensor) -> bool:
    """Whether `triton.weight_moments` can serve this input."""
    return TRITON and x.is_cuda and x.dtype in HALF
