"""The inputs of a model, of which a probe changes one sample or another."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from autoopt.capture.rerun import CannotRunError


def batch_size(leaves: Sequence[Any], axis: int) -> int | None:
    """How many samples the inputs hold along an axis: the first tensor that has it tells."""
    return next((leaf.shape[axis] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > axis), None)


def sample_axis(leaf: Any, axis: int, size: int) -> int | None:
    """Where an input holds its samples, if it does: on that axis, or on the other one of the first two.

    A mask of (batch, time) may stand beside (time, batch, features), a state of (layers, batch, features) too.
    """
    if not isinstance(leaf, Tensor):
        return None
    return next((a for a in (axis, 1 - axis) if leaf.dim() > a and leaf.shape[a] == size), None)


def _twice(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] == leaf.shape[1] == size


class Batch:
    """The inputs of a model, and the axis of each that holds the samples.

    Args:
        leaves: the inputs, of which some are tensors.
        axis: where the samples may be.
        lead: the input whose length is their number; by default the first tensor that has the axis.
        held: inputs that stay as they are, for being shared by all samples.
    """

    def __init__(self, leaves: Sequence[Any], axis: int, lead: int | None = None, held: Collection[int] = ()) -> None:
        having = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > axis]
        self.lead = next(iter(having), -1) if lead is None else lead
        size = leaves[self.lead].shape[axis] if having else 0
        if not size:
            raise CannotRunError(f"no tensor among the inputs has samples on axis {axis}")
        self.axis, self.size, self.held = axis, size, held
        self.samples = size if size > 1 else 3
        shape = leaves[self.lead].shape
        self.square = self.samples in (*shape[:axis], *shape[axis + 1 :])  # another axis is as long
        # A mask that has their number twice may be (time, time): it stays as it is.
        self.axes = [
            sample_axis(leaf, axis, size)
            if i not in held and (i == self.lead or size == 1 or not _twice(leaf, size))
            else None
            for i, leaf in enumerate(leaves)
        ]
        self.shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        if any(isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided) for leaf in leaves):
            raise CannotRunError("an input is sparse or nested")
        rows = torch.arange(self.samples) % size
        self.leaves = [
            leaf if own is None else leaf.detach().index_select(own, rows.to(leaf.device))
            for leaf, own in zip(leaves, self.axes, strict=True)
        ]

    @property
    def others(self) -> list[int]:
        """Those that hold samples beside the leading one."""
        return [i for i, axis in enumerate(self.axes) if axis is not None and i != self.lead]

    @property
    def twice(self) -> list[int]:
        """Those that were left alone for having the number of samples twice."""
        return [
            i for i, shape in enumerate(self.shapes) if shape and self.axes[i] is None and shape[:2] == (self.size,) * 2
        ]

    @property
    def shared(self) -> list[int]:
        """Those that hold none. One row may become as many as there are samples, and (N, N) may be (N, time)."""
        return [
            i
            for i, (shape, axis) in enumerate(zip(self.shapes, self.axes, strict=True))
            if shape and axis is None and (i in self.held or i < self.lead or not {1, self.size} & set(shape[:2]))
        ]

    def or_rather(self, i: int) -> str:
        """A warning: the samples may as well be the rows of one of the inputs."""
        shape = self.shapes[i]
        assert shape is not None
        return (
            f"the model is taken to be given {self.size} samples, on axis 1 of its input of shape {shape}, but they "
            f"may as well be the {shape[0]} on axis 0 of it. If they are, the statistics are wrong: make it the first "
            "input of the model."
        )

    def or_rows_of(self, i: int) -> str:
        """A warning: the samples may be the rows of another input, which are those of what the model returns."""
        return (
            f"the model is taken to be given {self.size} samples, the rows of its input of shape "
            f"{self.shapes[self.lead]}, which are the columns of what it returns. If they are the rows of its input of "
            f"shape {self.shapes[i]} instead, the statistics are wrong: make that the first input of the model."
        )

    def or_shared(self) -> str:
        """A warning: some inputs may be the same for all samples."""
        shapes = ", ".join(str(self.shapes[i]) for i in sorted({self.lead, *self.others}))
        return (
            f"the rows of all inputs of shapes {shapes} are taken as samples, which meet in the model. If one of them "
            "is shared by all samples instead, the statistics of what it reaches are wrong: give it another number of "
            "rows than the batch has, or expand it to the samples, as an input of shape (samples, ...)."
        )

    def with_changed(self, sample: int) -> list[Any]:
        """The inputs with another sample's values in place of one's own."""
        leaves = [leaf if a is None else leaf.clone() for leaf, a in zip(self.leaves, self.axes, strict=True)]
        batched = [leaf.movedim(a, 0) for leaf, a in zip(leaves, self.axes, strict=True) if a is not None]
        main = [x for x in batched if x.dim() > 1 or x.is_floating_point()]  # lengths may decide on shapes: they stay
        nearest = range(1, self.samples) if sample == 0 else range(sample - 1, -1, -1)  # samples may be sorted
        for inputs, other in itertools.product((main, batched), nearest):
            if any(not torch.equal(x[sample], x[other]) for x in inputs):
                for x in inputs:
                    x[sample] = x[other]
                return leaves
        for x in batched:
            if x.is_floating_point():
                noise = torch.rand_like(x[sample])
                x[sample] = torch.where(x[sample] == 0, noise / 4, x[sample] * (1 - noise / 2))
        return leaves
