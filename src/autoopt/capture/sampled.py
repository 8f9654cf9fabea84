"""Which samples are looked at, where to look at all of them would cost more than the backward pass itself.

Some layers give Σ_i c_i² of the whole batch for little. Convolutions, linear layers over positions and normalisations
have to form the contribution of each sample, only to square it. So, unless all are asked for, they look at m of the N
samples, but where all of them are a small matter: at one, in the middle (more would be evenly spaced). In a batch of
random order it is as good as any, so that N/m times the sum over the m is an unbiased estimate of the sum over all. The
choice depends on nothing but sizes, so that a run that is resumed, or skips a step, looks at the samples it would have
looked at.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoopt.moments import Moments, Operation, precision, wide
from autoopt.moments.operation import alike

ROOM = 1 << 16  # elements of all samples together that are a small matter
FEW = 1  # samples; the rule averages over a hundred steps
SMALL = 1 << 16  # elements of a tensor that may wait as it is: of a parameter's contributions, of what is looked at
TOGETHER = 1 << 24  # elements of contributions that are formed together
HELD = 1 << 28  # bytes of samples that may wait
KINDS = 1024  # of layers to remember


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


class Look(NamedTuple):
    """A layer in the backward pass, of the samples that are looked at."""

    operation: Operation
    names: dict[str, str]  # role, in which the layer reports on a parameter -> name of that
    dy: Tensor
    kept: tuple[Tensor, ...]


class Few:
    """What a few samples add to parameters in the pass that is under way.

    It is formed at the end of the pass, and that of layers that are alike is formed together, as if they were so many
    samples of one: a network has few kinds of layers. What is waiting has a limit.

    While a CUDA graph is recorded, where it is done beside the pass, it is formed earlier: as soon as so many layers of
    a kind are there as ever were. They are those that would be together at the end, so that the result is the same.

    Args:
        total: only the total of Σ c_i² is asked for.
    """

    def __init__(self, total: bool) -> None:
        self.total, self.number, self.share = total, FEW, 1.0
        self._alike: dict[Any, list[tuple[Look, Sequence[Tensor]]]] = {}  # with the parameters
        self._most: dict[Any, int] = {}  # of a kind that there ever were
        self._held = 0  # bytes that wait, or did so since all were formed
        self._small: dict[Any, list[tuple[Sequence[str], Tensor]]] = {}  # c_i of several parameters: (them, samples, *)
        self._found: dict[str, Tensor] = {}

    def add(self, look: Look, some: Some, parameters: Sequence[Tensor], early: bool) -> None:
        """Enter what a layer's samples add to `parameters`, in the order of their names."""
        self.number, self.share = some.number, some.share
        operation, names, dy, kept = look
        formats = () if self.total else tuple(parameter.stride() for parameter in parameters)
        key = operation.kind, *names, dy.device, *((part.shape, part.dtype) for part in (dy, *kept)), formats
        entries = self._alike.setdefault(key, [])
        entries.append((look, parameters))
        self._held += dy.nbytes + sum(part.nbytes for part in kept)
        if self._held > HELD:
            self._form()
        elif early and len(entries) == self._most.get(key):
            self._together(self._alike.pop(key))

    def squares(self) -> dict[str, Tensor]:
        """The estimate of Σ c_i² over all samples, for each of the parameters; these are forgotten."""
        self._form()
        found = self._totals() if self.total else self._elements()
        self.clear()
        return found

    def clear(self) -> None:
        self._alike, self._small, self._found, self._held = {}, {}, {}, 0

    def _form(self) -> None:
        alike, self._alike, self._held = self._alike, {}, 0
        if len(self._most) >= KINDS:  # a model that is called with other shapes every time
            self._most.clear()
        for key, entries in alike.items():
            self._most[key] = max(len(entries), self._most.get(key, 0))
            self._together(entries)

    def _together(self, entries: Sequence[tuple[Look, Sequence[Tensor]]]) -> None:
        """Form the contributions of layers that are alike."""
        size = max(1, TOGETHER // max(parameter.numel() for parameter in entries[0][1]))
        for start in range(0, len(entries), size):
            self._at_once(entries[start : start + size])

    def _at_once(self, entries: Sequence[tuple[Look, Sequence[Tensor]]]) -> None:
        looks = [look for look, _ in entries]
        operation, roles = looks[0].operation, list(looks[0].names)
        dy = joined([look.dy for look in looks])
        kept = tuple(map(joined, zip(*(look.kept for look in looks), strict=True)))
        for place, role in enumerate(roles):
            weight = role == "weight"
            c = operation.weight_contributions(dy, kept) if weight else operation.bias_contributions(dy)
            self._enter([look.names[role] for look in looks], c, entries[0][1][place])

    def _enter(self, names: Sequence[str], c: Tensor, parameter: Tensor) -> None:
        """What the samples of each of the layers add, one layer after the other, to parameters such as this one."""
        c = c.unflatten(0, (len(names), -1))
        if parameter.numel() <= SMALL:
            self._small.setdefault((c.device, c.dtype), []).append((names, c))
        elif self.total:
            sizes = torch.linalg.vector_norm(c.flatten(1), dim=1, dtype=precision(c))
            self._found |= zip(names, sizes.unbind(), strict=True)
        else:  # in the order of memory that the step will want
            c = wide(c)
            square = c[:, 0].square() if c.shape[1] == 1 else c.square().sum(1)
            if not alike(square[0], parameter.stride()):
                strides = torch.empty_like(parameter, device="meta").stride()
                square = square.new_empty_strided(square.shape, (parameter.numel(), *strides)).copy_(square)
            self._found |= zip(names, square.mul_(self.share).unbind(), strict=True)

    def _totals(self) -> dict[str, Tensor]:
        """Of what was found, which are the roots that one operation gives."""
        roots = self._found
        for entries in self._small.values():
            each = [(name, part) for names, c in entries for name, part in zip(names, c.unbind(), strict=True)]
            sizes = torch._foreach_norm([part for _, part in each], 2, dtype=precision(each[0][1]))
            roots |= zip((name for name, _ in each), sizes, strict=True)
        found: dict[str, Tensor] = {}
        for same in _kinds(roots):  # together: these are a number each
            squares = torch.stack(list(same.values())).square_().mul_(self.share)
            found |= zip(same, squares.unbind(), strict=True)
        return found

    def _elements(self) -> dict[str, Tensor]:
        for entries in self._small.values():
            flat = [c.transpose(0, 1).flatten(1) for _, c in entries]
            squares = squared(torch.cat(flat, 1), False).mul_(self.share).split([part.shape[1] for part in flat])
            for (names, c), square in zip(entries, squares, strict=True):
                self._found |= zip(names, square.view(len(names), *c.shape[2:]).unbind(), strict=True)
        return self._found


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _kinds(tensors: dict[str, Tensor]) -> Iterable[dict[str, Tensor]]:
    """Those that one operation can take."""
    kinds: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
    return kinds.values()
