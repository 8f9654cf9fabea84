"""What a backward pass left for one bucket."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoopt.capture import Source, sharded
from autoopt.optim.bucket import STATISTICS, Bucket, row_squares
from autoopt.optim.fused import Form, Sweep, sweep


class Moments(NamedTuple):
    """The spread of the samples in one bucket."""

    square: Tensor  # Σ_i c_i², (rows, ROW) where the metric has yet to weigh it, else its sum, (units,)
    samples: Tensor  # N, (units,)

    def of_all(self, source: Source, bucket: Bucket) -> "Moments":
        """Those of the samples of all ranks, for every element here."""
        if source.ranks == 1:
            return self
        square = self.square if bucket.group is not None else source.over_ranks(self.square)
        return Moments(square / source.ranks**2, source.over_ranks(self.samples))


class Reading(NamedTuple):
    """Gradients and second moments of one bucket."""

    group: dict[str, Any]
    bucket: Bucket
    gradient: Tensor  # g, (rows, ROW)
    present: Tensor | None  # which tensors have a gradient; None: all
    size: Tensor  # Σ g², (units,)
    moments: Moments | None  # None: this step measures none
    seen: Tensor  # finite where all of these are

    def largest(self) -> Tensor:
        """A finite number, if all are that must be."""
        return self.seen.max()


class Swept(NamedTuple):
    """What kernels have read where it lies."""

    group: dict[str, Any]
    bucket: Bucket
    sweep: Sweep
    samples: Tensor | int | None  # N, of each unit or of all; None: this step measures none

    def largest(self) -> Tensor:
        """As that of a `Reading`."""
        return torch.stack([self.sweep.sums.size, self.sweep.sums.spread]).max()

    def moments(self) -> Moments | None:
        """The spread, if this step measures one."""
        samples = self.samples
        if isinstance(samples, int):
            samples = torch.full_like(self.bucket.elements, samples)
        return None if samples is None else Moments(self.sweep.sums.square, samples)


def read(
    source: Source,
    group: dict[str, Any],
    bucket: Bucket,
    elementwise: bool,
    zeroed: Collection[nn.Parameter],
    form: Form | None,
) -> Reading | Swept:
    """Collect gradients and second moments, and see whether they are finite.

    Args:
        source: has the statistics.
        group: the bucket's options.
        bucket: the parameters.
        elementwise: whether the second moment is wanted for every element.
        zeroed: parameters whose `.grad` was set to zeros; without statistics these mean that there was no pass.
        form: the metric, if kernels are to do the step.
    """
    measures = not source.current.resting
    found = source.second_moments(bucket.names) if measures else [None] * len(bucket.names)
    blank = source.current.blank  # an empty batch; other ranks may have had samples
    gradients = [parameter.grad for parameter in bucket.params]
    if measures and any([square is None for square in found]):  # noqa: C419 - half the time of a generator
        alone = not (blank and source.current.group is not None)
        gradients = [
            None if alone and square is None and (blank or parameter in zeroed) else gradient
            for gradient, parameter, square in zip(gradients, bucket.params, found, strict=True)
        ]
    for name, given, seen in zip(bucket.names, gradients, found, strict=True):
        if given is not None and (given.is_sparse or (measures and seen is None and not blank)):
            _refuse(name, given)
    gradients = bucket.here(gradients)
    squares: list[Tensor | None] | None = None
    changed = None
    if measures:
        squares = [None if given is None else seen for given, seen in zip(gradients, found, strict=True)]
        if elementwise and bucket.group is not None and any(given is not None for given in gradients):
            squares = _scattered(bucket, gradients, squares)
        changed = source.changed(bucket.names, gradients)
    if form is not None:
        swept = sweep(bucket, group, form, gradients, squares, changed, elementwise=elementwise)
        if swept is not None:
            return Swept(group, bucket, swept, _samples(source, bucket, gradients) if measures else None)

    gradient, present = bucket.rows(gradients, "gradient"), bucket.present(gradients)
    if squares is None:
        size = bucket.sum(row_squares(gradient))
        return Reading(group, bucket, gradient, present, size, None, size)
    # what was done to g since the backward pass (`factors`) was not done to Σ c_i²: do it now
    factors = None if changed is None else source.factors(changed).square()
    if elementwise:
        square = bucket.rows(squares, "spare")
        square = square if factors is None else square.mul_(bucket.column(factors))
        size, total = bucket.sums(row_squares(gradient), square.sum(1))
    else:
        totals = bucket.stack(squares).to(STATISTICS)
        square = total = bucket.reduce(totals if factors is None else totals * factors, "sum")
        size = bucket.sum(row_squares(gradient))
    samples = _samples_of_units(source, bucket, gradients)
    return Reading(group, bucket, gradient, present, size, Moments(square, samples), size + total)


def _samples(source: Source, bucket: Bucket, gradients: Sequence[Tensor | None]) -> Tensor | int:
    """N, from the host where it is the same for all that have a gradient; the others do not move."""
    found = [source.samples(name) for name, given in zip(bucket.names, gradients, strict=True) if given is not None]
    first = found[0] if found else 0
    if source.ranks == 1 and isinstance(first, int) and all(isinstance(n, int) and n == first for n in found):
        return first
    return _samples_of_units(source, bucket, gradients)


def _samples_of_units(source: Source, bucket: Bucket, gradients: Sequence[Tensor | None]) -> Tensor:
    """N of each unit."""
    counts = [0 if given is None else source.samples(name) for name, given in zip(bucket.names, gradients, strict=True)]
    return bucket.reduce(bucket.numbers(counts), "max")


def _scattered(
    bucket: Bucket, gradients: Sequence[Tensor | None], squares: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Of sharded parameters, Σ c² over the samples of all ranks, in the rows that lie on this one."""
    trained = [i for i, gradient in enumerate(gradients) if gradient is not None]
    parameters = [bucket.params[i] for i in trained]
    given = [  # zeros on a rank without samples
        bucket.zero.expand(p.shape) if (s := squares[i]) is None else s
        for i, p in zip(trained, parameters, strict=True)
    ]
    result: list[Tensor | None] = [None] * len(squares)
    for i, square in zip(trained, sharded.scattered(given, parameters), strict=True):
        result[i] = square
    return result


def _refuse(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise RuntimeError(
            f"the gradient of parameter '{name}' is sparse, which AutoOpt does not train: set sparse=False there."
        )
    raise RuntimeError(
        f"parameter '{name}' has a gradient but no statistics. Either no backward() has reached its layer since "
        "the last step() or zero_grad(), or the gradient did not come from the layer's own forward pass (but from "
        "F.linear(x, layer.weight), say, or from the loss, to which forward returned the parameter itself). Call "
        "the layer itself and backward(), without inputs=, before each step(); use the parameter in the forward of "
        "a module, or return it with a row for each sample, as log_std.expand_as(mean); take the spread from whole "
        "passes, by AutoSGD(model, spread='passes'); or leave the parameter to another optimizer through "
        "param_groups."
    )
