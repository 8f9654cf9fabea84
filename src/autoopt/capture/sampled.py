"""Which samples are looked at, where to look at all of them would cost more than the backward pass itself.

Some layers give Σ_i c_i² of the whole batch for little. Convolutions, linear layers over positions and normalisations
have to form the contribution of each sample, only to square it. So, unless all are asked for, they look at m of the N
samples, but where all of them are a small matter: at one, in the middle (more would be evenly spaced). In a batch of
random order it is as good as any, so that N/m times the sum over the m is an unbiased estimate of the sum over all. The
choice depends on nothing but sizes, so that a run that is resumed, or skips a step, looks at the samples it would have
looked at.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoopt.moments import Moments, Operation, precision, wide
from autoopt.moments.operation import alike

ROOM = 1 << 16  # elements of all samples together that are a small matter
FEW = 1  # samples; the rule averages over a hundred steps
SMALL = 1 << 16  # elements of contributions that wait for those of other parameters


class Some(NamedTuple):
    """Some of the samples."""

    rows: slice
    number: int
    share: float  # N/m: how many samples each of them stands for


class Sampler:
    """The choice of samples; `exact` looks at all."""

    def __init__(self, exact: bool = True) -> None:
        self.exact = exact

    def choose(self, samples: int, each: int) -> Some | None:
        """Those to look at, where one takes so many elements; None: all of them."""
        if self.exact or samples <= FEW or samples * each <= ROOM:
            return None
        stride = -(-samples // FEW)
        first = (stride - 1) // 2
        number = -(-(samples - first) // stride)
        return Some(slice(first, samples, stride), number, samples / number)

    def of(self, operation: Operation, x: Tensor, weight: Tensor) -> Some | None:
        """Those of a layer's input to look at; None: all of them."""
        if self.exact or x.dim() < 2 or not operation.forms(x):
            return None
        samples = x.shape[0]
        return self.choose(samples, max(x.numel() // max(1, samples), weight.numel()))


def moments(
    operation: Operation,
    dy: Tensor,
    kept: tuple[Tensor, ...],
    weight: Tensor | None,
    some: Some | None,
    total: bool,
) -> tuple[Tensor | None, Moments]:
    """The gradient of the input (where there is a `weight` to have it from), and the moments of the weight."""
    if some is None:
        dx = None if weight is None else operation.input_gradient(dy, kept, weight)
        return dx, operation.weight_moments(dy, kept, total)
    dx, dw = operation.gradients(dy, kept, weight)
    c = operation.weight_contributions(dy[some.rows], operation.select(kept, some.rows))
    return dx, Moments(dw, squared(c, total) * some.share)


def bias_moments(operation: Operation, dy: Tensor, some: Some | None, total: bool) -> Moments:
    """The moments of the bias, by the same samples."""
    if some is None:
        return operation.bias_moments(dy, total)
    c = operation.bias_contributions(dy)
    return Moments(c.sum(0), squared(c[some.rows], total) * some.share)


def squared(contributions: Tensor, total: bool) -> Tensor:
    """Σ_i c_i², elementwise or in total."""
    c = wide(contributions)
    if total:
        return c.flatten().dot(c.flatten())
    return c[0].square() if len(c) == 1 else c.square().sum(0)


class Few:
    """What a few samples add to parameters in the pass that is under way. Small ones are squared all at once.

    Args:
        total: only the total of Σ c_i² is asked for.
    """

    def __init__(self, total: bool) -> None:
        self.total, self.share = total, 1.0
        self._small: dict[str, Tensor] = {}  # c_i
        self._large: dict[str, Tensor] = {}  # Σ c_i², or of its total the root, which takes one operation

    def add(self, name: str, c: Tensor, share: float, parameter: Tensor) -> None:
        """Enter what each sample adds to a `parameter`, (samples, *shape); it stands for `share` of them."""
        self.share = share
        if c.numel() <= SMALL:
            self._small[name] = c
        elif self.total:
            self._large[name] = torch.linalg.vector_norm(c, dtype=precision(c))
        else:  # in the order of memory that the step will want
            square = squared(c, False)
            if not alike(square, parameter.stride()):
                square = torch.empty_like(parameter, dtype=square.dtype).copy_(square)
            self._large[name] = square

    def squares(self) -> dict[str, Tensor]:
        """The estimate of Σ c_i² over all samples, for each of the parameters; these are forgotten."""
        if self.total:
            found = self._totals()
        elif found := self._large | self._small_squares():
            torch._foreach_mul_(list(found.values()), self.share)
        self.clear()
        return found

    def clear(self) -> None:
        self._small, self._large = {}, {}

    def _totals(self) -> dict[str, Tensor]:
        sizes = dict(self._large)
        for small in _kinds(self._small):
            c = list(small.values())
            sizes |= dict(zip(small, torch._foreach_norm(c, 2, dtype=precision(c[0])), strict=True))
        found: dict[str, Tensor] = {}
        for same in _kinds(sizes):  # together: these are a number each
            squares = torch.stack(list(same.values())).square_().mul_(self.share)
            found |= dict(zip(same, squares.unbind(), strict=True))
        return found

    def _small_squares(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for small in _kinds(self._small):
            flat = [c.flatten(1) for c in small.values()]
            parts = squared(torch.cat(flat, 1), False).split([c.shape[1] for c in flat])
            found |= {name: part.view(c.shape[1:]) for (name, c), part in zip(small.items(), parts, strict=True)}
        return found


def _kinds(tensors: dict[str, Tensor]) -> Iterable[dict[str, Tensor]]:
    """Those that one operation can take."""
    kinds: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
    return kinds.values()
