"""Which axis of a layer's input is the batch: the model runs again with one sample changed, and its layers show.

It runs four times: on its input, on the same again (what differs then is noise), with the first sample replaced by a
neighbour, and with the last one replaced. If the rows of a layer's input that move are those of the changed sample and
no others, they are its rows. Axis 0 of the model's inputs is tried first; where samples mix along it, as time does in a
model of (time, batch, features), axis 1. Other layers than those asked for, and what the model returns, bear witness to
it. If neither mixes, nothing in the model tells them apart, and it is 0.

Where the answer is not plain:
- *Nothing moves* (dead ReLUs, a branch that starts at zero, identical samples of integers): the axis that is as long as
  the batch, the one that the model's inputs have it on or else the first. A layer without such an axis is given the
  same for all samples (positions, say): None.
- *Identical samples, zeros, a batch of one*: floats are shrunk at random, so that what they stand for stays in range;
  integers stay, as any other number may be out of range. One sample is run as three.
- *Samples that meet* (batch statistics in evaluation too, a contrastive loss, attention across the batch): the layers
  before have their answer; those after keep the axis that is as long as the batch, with a warning if the other axis of
  the inputs could be the batch as well. Without such an axis it is an error that names the layer.
- *Rows that are routed* (a mixture of experts), so that their number changes with the data: what a `Watch` sees has to
  tell (`routes`), or it is the same error.
- *Layers that are not reached* are not spoken of: probe again when they are.
- *A forward pass that raises* when it runs again, inputs without a tensor, a list of samples: no layouts, a warning.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from autoopt.capture.rerun import (
    KNOWN,
    OUTPUT,
    CannotRunError,
    Seen,
    Trace,
    rerun,
    same_random_numbers,
    sample_axes,
    undisturbed,
)


class Layout(NamedTuple):
    """Where the samples lie in the input of a layer."""

    axis: int = 0
    fold: int = 1  # so many rows of the axis belong to one sample, at most, if the layer is called several times
    strided: bool = False  # they are not consecutive: row i belongs to sample i mod N


class Found(NamedTuple):
    """What a probe found."""

    layouts: dict[str, Layout | None]  # of each layer that was reached; None if it is given the same for all samples
    shown: frozenset[str] = frozenset()  # the layers whose rows moved as the layout says; the others' is by length
    axis: int = 0  # that of the samples in the model's inputs
    doubt: str | None = None  # what to warn of
    routed: frozenset[str] = frozenset()  # layers whose rows are told apart by nothing that they are given


def probe(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layers: Mapping[str, nn.Module],
    agree: Callable[[bool], bool] | None = None,
) -> Found:
    """The layouts of those layers that a forward pass of the model reaches, as far as they can be told.

    `agree`: whether any rank says so, for models that must run as often on each.
    """
    inputs = (*args, *kwargs.values())
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    asked = set(layers.values())
    others = {f"witness {i}": m for i, m in enumerate(model.modules()) if isinstance(m, KNOWN) and m not in asked}

    def ask(axis: int) -> "Answer | CannotRunError":
        try:
            if inputs and isinstance(inputs[0], list | PackedSequence):
                raise CannotRunError(f"its first input is a {type(inputs[0]).__name__}, which has no axis for samples")
            batch = Batch(leaves, axis)
            return Answer(batch, _runs(model, batch, structure, {**layers, **others}), layers)
        except CannotRunError as error:
            return error

    first = ask(0)
    mixed = isinstance(first, Answer) and first.doubtful
    mixed = mixed if agree is None else agree(mixed)
    second = ask(1) if mixed else None
    if isinstance(first, CannotRunError):
        doubt = (
            f"the first axis of every layer's input is taken as the batch: {type(model).__name__} could not be run "
            f"again to see whether it is ({first}). Where it is not, the statistics are wrong."
        )
        return Found({}, doubt=doubt)
    if second is None:
        return first.found()
    if isinstance(second, CannotRunError):
        return first.found(doubt=(batch_size(leaves, 1) or 0) > 1)
    if not second.mixed:  # if nothing moved either, it is by elimination
        return second.found(doubt=not second.own and second.batch.size > 1)
    best, other = (second, first) if len(second.own) > len(first.own) else (first, second)
    return best.found(doubt=bool(other.own))


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


Moved = dict[int, list[list[int]]]
"""Axis -> for each change the indices at which a layer's input moved."""


class Batch:
    """The inputs of a model, and the axis of each that holds the samples.

    Args:
        leaves: the inputs, of which some are tensors.
        axis: where the samples may be.
    """

    def __init__(self, leaves: Sequence[Any], axis: int) -> None:
        size = batch_size(leaves, axis)
        if not size:
            raise CannotRunError(f"no tensor among the inputs has samples on axis {axis}")
        self.axis, self.size = axis, size
        self.samples = size if size > 1 else 3
        lead = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > axis)
        self.square = self.samples in (*lead.shape[:axis], *lead.shape[axis + 1 :])  # another axis is as long
        # A mask that has their number twice may be (time, time): it stays as it is.
        self.axes = [
            sample_axis(leaf, axis, size) if leaf is lead or size == 1 or not _twice(leaf, size) else None
            for leaf in leaves
        ]
        if any(isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided) for leaf in leaves):
            raise CannotRunError("an input is sparse or nested")
        rows = torch.arange(self.samples) % size
        self.leaves = [
            leaf if own is None else leaf.detach().index_select(own, rows.to(leaf.device))
            for leaf, own in zip(leaves, self.axes, strict=True)
        ]

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


class Answer:
    """What the runs along one axis of the inputs say of each layer, and of what else was seen, as witnesses."""

    def __init__(self, batch: Batch, runs: Sequence[Trace], layers: Mapping[str, nn.Module]) -> None:
        self.batch, self.layers = batch, layers
        self.shapes = {name: [seen.shape for seen in calls] for name, calls in runs[0].items()}
        self.own: dict[str, Layout] = {}  # the rows of the changed sample moved, and no others
        self.still: list[str] = []  # none moved
        self.mixed: list[str] = []  # others did too
        for name in runs[0]:
            calls = [run.get(name, []) for run in runs]
            if any([seen.shape for seen in call] != self.shapes[name] for call in calls):
                self.mixed.append(name)
                continue
            moved = [_moved(*call) for call in zip(*calls, strict=True)]
            layouts = _fitting(self.shapes[name], moved, batch.samples)
            if not any(rows for call in moved for changes in call.values() for rows in changes):
                self.still.append(name)
            elif not layouts or (layouts[0].fold > 1 and layouts[0]._replace(strided=True) in layouts[1:]):
                self.mixed.append(name)
            else:
                self.own[name] = layouts[0]

    @property
    def doubtful(self) -> bool:
        """Whether samples mix on the way. If what the model returns shows none of it, they are routed instead."""
        returned = [name for name in self.shapes if name.startswith(OUTPUT)]
        shown = any(name in self.own for name in returned) and not any(name in self.mixed for name in returned)
        return bool(self.mixed) and not shown

    def found(self, doubt: bool = False) -> Found:
        """The layout of every layer that has one; `doubt` if the other axis of the inputs may be the batch too."""
        layouts: dict[str, Layout | None] = {name: own for name, own in self.own.items() if name in self.layers}
        guessed, routed = [], set()
        for name in (*self.mixed, *self.still):
            if name not in self.layers:
                continue
            axis = self._by_length(name)
            if axis is None and name in self.mixed:
                routed.add(name)
                continue
            layouts[name] = None if axis is None else Layout(axis)
            if axis is not None and (doubt or (name in self.still and self.batch.square and axis != self.batch.axis)):
                guessed.append(f"axis {axis} of the input of layer '{name}', of shape {tuple(self.shapes[name][0])},")
        if not guessed:
            return Found(layouts, frozenset(self.own), self.batch.axis, routed=frozenset(routed))
        more = f" (as in {len(guessed) - 1} more layers)" if len(guessed) > 1 else ""
        warning = (
            f"{guessed[0]} is taken as the batch for its length alone{more}: samples meet before the layer, or do not "
            "reach it. If it is not, the statistics are wrong: give the model the batch as first axis, or leave the "
            "layer to another optimizer through param_groups."
        )
        return Found(layouts, frozenset(self.own), self.batch.axis, warning, frozenset(routed))

    def _by_length(self, name: str) -> int | None:
        """The axis that is as long as the batch in all calls."""
        axes = [(shape, sample_axes(self.layers[name], shape)) for shape in self.shapes[name]]
        if all(not possible for _, possible in axes):  # the input is one sample
            return 0
        for axis in (self.batch.axis, 0):
            if all(axis in possible and shape[axis] == self.batch.samples for shape, possible in axes):
                return axis
        return None


def _runs(model: nn.Module, batch: Batch, structure: pytree.TreeSpec, layers: Mapping[str, nn.Module]) -> list[Trace]:
    """What the layers are given: of the batch, of the batch again, with the first sample changed, with the last."""
    devices = {x.device for x in (*model.parameters(), *batch.leaves) if isinstance(x, Tensor)}
    traces = []
    with undisturbed(model):
        for change in (None, None, 0, batch.samples - 1):
            with same_random_numbers(devices):
                leaves = batch.leaves if change is None else batch.with_changed(change)
            with same_random_numbers(devices):
                copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                args, kwargs = pytree.tree_unflatten(copies, structure)
                traces.append(rerun(model, args, kwargs, layers))
    return traces


def _moved(base: Seen, again: Seen, *changed: Seen) -> Moved:
    """The indices at which the input of a layer moved by more than noise, in each change."""
    moved: Moved = {}
    for axis, values in base.prints.items():
        noise = (again.prints[axis] - values).abs().nan_to_num().amax() * 4 + base.slack
        moved[axis] = []
        for seen in changed:
            now = seen.prints[axis]
            rows = ((now - values).abs() > noise) | (now.isnan() != values.isnan())
            moved[axis].append(rows.nonzero().flatten().tolist())
    return moved


def _fitting(shapes: Sequence[torch.Size], moved: Sequence[Moved], samples: int) -> list[Layout]:
    """The layouts by which rows of the first sample alone moved in the first change, of the last one in the second.

    A call in which nothing moved may be given the same for all samples: it need not fit beside others.
    """
    fitting = []
    calls = list(zip(shapes, moved, strict=True))
    told = [(shape, call) for shape, call in calls if any(map(any, call.values()))] or calls
    for axis in set.intersection(*(set(call) for _, call in told)):
        if any(shape[axis] % samples for shape, _ in told):
            continue
        longest = max(shape[axis] for shape, call in calls if axis in call and shape[axis] % samples == 0)
        for strided in (False, True):
            owners = [
                ({_owner(row, shape[axis], samples, strided) for row in rows}, changed)
                for shape, call in told
                for rows, changed in zip(call[axis], (0, samples - 1), strict=True)
            ]
            if all(found <= {changed} for found, changed in owners):
                fitting.append(Layout(axis, longest // samples, strided))
    return sorted(fitting, key=lambda layout: (layout.fold, layout.axis, layout.strided))


def _owner(row: int, length: int, samples: int, strided: bool) -> int:
    return row % samples if strided else row // (length // samples)
