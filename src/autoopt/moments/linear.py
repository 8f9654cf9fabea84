"""Linear layers: y = x Wᵀ + b over the last axis of x, samples on the first."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt.moments.operation import Moments, Operation, Products, by_feature, owned, precision, wide
from autoopt.moments.product import LONG, Product, in_tiles, product, product_moments


@dataclass(frozen=True)
class Linear(Operation):
    """(samples, *positions, in) -> (samples, *positions, out)."""

    lowers = True
    keeps_input = True
    positional = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return owned(F.linear(x, weight, bias)), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        return dy @ weight

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        (x,) = kept
        if x.dim() == 2:
            return Moments(dy.T @ x, outer_square(dy, x, total))
        return sequence_moments(dy.flatten(1, -2), x.flatten(1, -2), total)

    def weight_square(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Tensor:
        (x,) = kept
        return outer_square(dy, x, total) if x.dim() == 2 else super().weight_square(dy, kept, total)

    def forms(self, x: Tensor) -> bool:
        return x.dim() > 2

    def weight_gradient(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return self.weight_use(dy, kept).gradient()

    def weight_use(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Product:
        (x,) = kept
        return Product(_positions(dy), _positions(x))

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return product(_positions(dy).mT, _positions(kept[0]))

    def bias_contributions(self, dy: Tensor) -> Tensor:
        return dy if dy.dim() == 2 else _positions(dy).sum(1)

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Products | None:
        left, right = (by_feature(part, 1) for part in (dy, kept[0]))
        return None if left is None or right is None else Products(left.unsqueeze(2), right.unsqueeze(2))


@dataclass(frozen=True)
class Transposed(Operation):
    """(samples, *positions, in) -> (samples, *positions, out), by a weight that is stored (in, out)."""

    lowers = True
    keeps_input = True
    positional = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return owned(F.linear(x, weight.T, bias)), (x,)

    def input_gradient(self, dy: Tensor, kept: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        return dy @ weight.T

    def weight_moments(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Moments:
        return Linear().weight_moments(kept[0], (dy,), total)

    def weight_square(self, dy: Tensor, kept: tuple[Tensor, ...], total: bool) -> Tensor:
        return Linear().weight_square(kept[0], (dy,), total)

    def forms(self, x: Tensor) -> bool:
        return Linear().forms(x)

    def weight_gradient(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return Linear().weight_gradient(kept[0], (dy,))

    def weight_use(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Product:
        return Linear().weight_use(kept[0], (dy,))

    def weight_contributions(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return Linear().weight_contributions(kept[0], (dy,))

    def bias_contributions(self, dy: Tensor) -> Tensor:
        return Linear().bias_contributions(dy)

    def of_one(self, dy: Tensor, kept: tuple[Tensor, ...]) -> Products | None:
        form = Linear().of_one(kept[0], (dy,))
        return None if form is None else form._replace(bias=2)


def _positions(x: Tensor) -> Tensor:
    """(samples, positions, features)."""
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def outer_square(dy: Tensor, x: Tensor, total: bool) -> Tensor:
    """Σ_i c_i² of c_i = δ_i a_iᵀ, which have rank one: c_i² = δ_i² (a_i²)ᵀ and |c_i| = |δ_i| |a_i|. None is formed."""
    if total:
        delta, a = (torch.linalg.vector_norm(rows, dim=1, dtype=precision(rows)) for rows in (dy, x))
        sizes: Tensor = delta * a
        return sizes.dot(sizes)
    return wide(dy).square().T @ wide(x).square()


def sequence_moments(dy: Tensor, x: Tensor, total: bool) -> Moments:
    """c_i = Σ_t δ_it a_itᵀ, from (samples, positions, out) and (samples, positions, in), in the cheapest way."""
    use = Product(dy, x)
    if total and use.gram_pays():
        return Moments(use.gradient(), use.total())
    if in_tiles(x) and x.shape[1] <= LONG:
        from autoopt.moments import triton

        gradient, square = triton.weight_moments(dy.mT.unsqueeze(2), x.mT.unsqueeze(2), total)  # an image of one row
        return Moments(gradient[..., 0, 0], square if total else square[..., 0, 0])
    return product_moments(dy, x, total)


def prepare(layer: nn.Linear, x: Tensor) -> tuple[Linear, Tensor]:
    """The operation of an nn.Linear; a single vector is a batch of one sample."""
    return Linear(), x if x.dim() > 1 else x.unsqueeze(0)


def prepare_transposed(layer: nn.Module, x: Tensor) -> tuple[Transposed, Tensor]:
    """The operation of a linear layer that keeps its weight as (in, out)."""
    return Transposed(), x if x.dim() > 1 else x.unsqueeze(0)
