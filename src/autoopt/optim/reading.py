"""What a backward pass left for one bucket."""

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from autoopt.capture import Source
from autoopt.optim.bucket import Bucket


class Moments(NamedTuple):
    """The spread of the samples in one bucket."""

    square: Tensor  # Σ_i c_i², (rows, ROW) where the metric weighs it, else its sum, (units,)
    samples: Tensor  # N, (units,)


class Reading(NamedTuple):
    """Gradients and second moments of one bucket."""

    group: dict[str, Any]
    bucket: Bucket
    gradient: Tensor  # g, (rows, ROW)
    present: Tensor | None  # which tensors have a gradient; None: all
    size: Tensor  # Σ g², (units,)
    moments: Moments | None  # None: this step measures none
    bad: Tensor  # how many units hold a number that is not finite


def read(
    source: Source, group: dict[str, Any], bucket: Bucket, elementwise: bool, zeroed: Collection[nn.Parameter]
) -> Reading:
    """Collect gradients and second moments, and see whether they are finite.

    Args:
        source: has the statistics.
        group: the bucket's options.
        bucket: the parameters.
        elementwise: whether the second moment is wanted for every element.
        zeroed: parameters whose `.grad` was set to zeros; without statistics these mean that there was no pass.
    """
    measures = not source.current.resting
    found = [source.second_moment(name) if measures else None for name in bucket.names]
    gradients = [
        None if measures and square is None and (source.current.blank or parameter in zeroed) else parameter.grad
        for parameter, square in zip(bucket.params, found, strict=True)
    ]
    for name, gradient, square in zip(bucket.names, gradients, found, strict=True):
        if gradient is not None:
            _refuse(name, gradient, missed=measures and square is None)
    gradient = bucket.rows(gradients)
    (size,) = bucket.sums(gradient.square())
    present = bucket.present(gradients)
    if not measures:
        return Reading(group, bucket, gradient, present, size, None, size.isfinite().logical_not().sum())
    squares = [None if gradient is None else square for gradient, square in zip(gradients, found, strict=True)]
    square = bucket.rows(squares) if elementwise else bucket.stack(squares)
    changed = source.changed(bucket.names, gradients)
    if changed is not None:  # what was done to g since the backward pass was not done to Σ c_i²: do it now
        factor = changed.square()
        square = square * (bucket.column(factor) if elementwise else factor)
    if elementwise:
        (spread,) = bucket.sums(square)
    else:
        square = spread = bucket.reduce(square, "sum")
    counts = [
        None if gradient is None else source.samples(name)
        for name, gradient in zip(bucket.names, gradients, strict=True)
    ]
    samples = bucket.reduce(bucket.stack(counts), "max")
    bad = (size + spread).isfinite().logical_not().sum()
    return Reading(group, bucket, gradient, present, size, Moments(square, samples), bad)


def _refuse(name: str, gradient: Tensor, *, missed: bool) -> None:
    if gradient.is_sparse:
        raise RuntimeError(
            f"the gradient of parameter '{name}' is sparse, which AutoOpt does not train: set sparse=False there."
        )
    if missed:
        raise RuntimeError(
            f"parameter '{name}' has a gradient but no statistics. Either no backward() has reached its layer since "
            "the last step() or zero_grad(), or the gradient did not come from the layer's own forward pass (but from "
            "F.linear(x, layer.weight), say). Call the layer itself and backward() before each step(), or leave the "
            "parameter to another optimizer through param_groups."
        )
