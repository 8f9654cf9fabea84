"""Which axis of a layer's input is the batch: the model runs again with one sample changed, and its layers show.

It runs four times: on its input, on the same again (what differs then is noise), with the first sample replaced by a
neighbour, and with the last one replaced. If the rows of a layer's input that move are those of the changed sample and
no others, they are its rows. Axis 0 of the model's inputs is tried first; where samples mix along it, as time does in a
model of (time, batch, features), axis 1. Other layers than those asked for, and what the model returns, bear witness to
it. If neither mixes, nothing in the model tells them apart, and it is 0.

Where the answer is not plain:
- *An input that all samples share* (coordinates, weights of time steps) may be as long as the batch: then a change of
  its first row is no change of a sample. Where axis 1 is about to be chosen, axis 0 is asked again with the first input
  alone changed; if nothing mixes then, it is 0 and the others are shared. It may also be the first input that is
  shared: where samples mix, the length of another one is tried as their number. What cannot be told is a doubt.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

Path = tuple[int | str, int]
"""An input of a module: position or name of the argument, and number of the leaf in it."""


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
    shared: frozenset[Path] = frozenset()  # inputs that hold no samples, even if they are as long as the batch


def named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """What a module is called with, in the order of `tree_leaves`."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in arguments:
        for number, leaf in enumerate(pytree.tree_leaves(value)):
            yield (key, number), leaf


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
    try:
        best, found = Inquiry(model, args, kwargs, layers, agree or bool).judge()
    except CannotRunError as error:
        doubt = (
            f"the first axis of every layer's input is taken as the batch: {type(model).__name__} could not be run "
            f"again to see whether it is ({error}). Where it is not, the statistics are wrong."
        )
        return Found({}, doubt=doubt)
    paths = [path for path, _ in named_leaves(args, kwargs)]
    return found._replace(shared=frozenset(paths[i] for i in best.batch.shared))


class Inquiry:
    """The questions that are put to a model, and which answer is believed."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layers: Mapping[str, nn.Module],
        agree: Callable[[bool], bool],
    ) -> None:
        self.model, self.layers, self.agree = model, layers, agree
        self.inputs = (*args, *kwargs.values())
        self.leaves, self.structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.dim()]
        asked = set(layers.values())
        others = (m for m in model.modules() if isinstance(m, KNOWN) and m not in asked)
        self.seen = {**layers, **{f"witness {i}": m for i, m in enumerate(others)}}
        self.problem = CannotRunError()  # why it could not run when it was first asked

    def ask(self, axis: int, *, lead: int | None = None, held: Collection[int] = ()) -> "Answer | None":
        """Change samples along an axis, in all inputs that are as long as the leading one but those that are held."""
        try:
            if self.inputs and isinstance(self.inputs[0], list | PackedSequence):
                kind = type(self.inputs[0]).__name__
                raise CannotRunError(f"its first input is a {kind}, which has no axis for samples")
            batch = Batch(self.leaves, axis, lead, held)
            return Answer(batch, _runs(self.model, batch, self.structure, self.seen), self.layers)
        except CannotRunError as error:
            self.problem = error
            return None

    def judge(self) -> "tuple[Answer, Found]":
        """The answer that is believed, and what it says. What one rank has to ask all ask, as they run together."""
        first = self.ask(0)
        problem, mixed = self.problem, self.agree(first is not None and first.doubtful)
        second = self.ask(1) if mixed else None
        better = first is not None and second is not None and second.beats(first)
        held = first.batch.others if first is not None and mixed else []
        even = first is not None and second is not None and second.equals(first, held)
        alone = self._alone(held, better or even)
        rest = self._rest(first, bool(held) and not better)
        elsewhere = self._elsewhere(first, second, mixed)
        if first is None:
            raise problem
        if not mixed:
            rival = next((other.batch.lead for other in elsewhere if other.clean), None)
            return first, first.found(warning=None if rival is None else first.batch.or_rather(rival))
        parts = [part for part in (alone, rest) if part is not None and part.clean]
        likely = alone is not None and alone.clean and (better or (even and rest not in parts))
        if likely and alone is not None and second is not None and not second.along(alone.batch.held):
            return alone, alone.found(before=first)
        most = max((len(answer.own) for answer in (first, second) if answer is not None and answer.mixed), default=0)
        leading = next((other for other in elsewhere if other.leads and len(other.own) > most), None)
        if leading is not None:
            return leading, leading.found(before=first)
        if second is None:
            return first, first.found(doubt=(batch_size(self.leaves, 1) or 0) > 1)
        if not second.mixed:  # if nothing moved either, it is by elimination
            without = second.batch.axes[first.batch.lead] is None  # the first input has no part in it
            warning = second.batch.or_rather(second.batch.lead) if without else None
            return second, second.found(doubt=not second.own and second.batch.size > 1, warning=warning)
        best, other = (second, first) if better else (first, second)
        warning = first.batch.or_shared() if not better and len(parts) == 1 else None
        return best, best.found(doubt=bool(other.own), warning=warning)

    def _alone(self, held: Sequence[int], matters: bool) -> "Answer | None":
        """The leading input alone is changed, and of the others those with which nothing mixes either."""
        alone = self.ask(0, held=held) if self.agree(bool(held)) else None
        for i in self.tensors:
            fewer = [other for other in held if other != i]
            if self.agree(matters and alone is not None and alone.clean and len(held) > len(fewer) > 0):
                wider = self.ask(0, held=fewer)
                if wider is not None and wider.clean and len(held) > len(fewer) > 0:
                    alone, held = wider, fewer
        return alone

    def _rest(self, first: "Answer | None", wanted: bool) -> "Answer | None":
        """All but the leading input are changed."""
        return self.ask(0, held=[] if first is None else [first.batch.lead]) if self.agree(wanted) else None

    def _elsewhere(self, first: "Answer | None", second: "Answer | None", mixed: bool) -> "list[Answer]":
        """Other inputs lead: their length may be the number of samples, where that of the first one is not plain."""
        rivals: list[int] = []
        if first is not None and not mixed:
            rivals = [i for i in first.batch.others if first.batch.axes[i] == 1]
            rivals += first.batch.twice if first.returned == {1} else []
        elif first is not None and (second is None or second.mixed or second.batch.lead != first.batch.lead):
            later = second.batch.lead if second is not None else first.batch.lead
            rivals = [i for i in self.tensors if first.batch.axes[i] != 0 and self.leaves[i].dim() > 1]
            rivals += [later] if later != first.batch.lead else []
        held = [] if first is None else [first.batch.lead]
        answers = [self.ask(0, lead=i, held=held) for i in self.tensors if self.agree(i in rivals)]
        return [answer for answer in answers if answer is not None and answer.batch.lead in rivals]


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

    @property
    def clean(self) -> bool:
        """Whether samples move and do not mix."""
        return bool(self.own) and not self.doubtful

    @property
    def returned(self) -> set[int]:
        """The axes on which what the model returns has them."""
        return {layout.axis for name, layout in self.own.items() if name.startswith(OUTPUT)}

    @property
    def leads(self) -> bool:
        """Whether what the model returns, and all of its inputs, have them where the leading input has them."""
        return self.clean and self.returned == {self.batch.axis} and 1 not in self.batch.axes[: self.batch.lead]

    def beats(self, first: "Answer") -> bool:
        """Whether this one, along axis 1, is believed rather than the first one, if that is doubtful."""
        return not self.mixed or len(self.own) > len(first.own)

    def equals(self, first: "Answer", inputs: Collection[int]) -> bool:
        """Whether as much speaks for this one, in which all of these inputs change too."""
        return len(self.own) == len(first.own) and all(self.batch.axes[i] is not None for i in inputs)

    def along(self, inputs: Collection[int]) -> bool:
        """Whether some of these inputs have samples on this axis themselves."""
        return any(self.batch.axes[i] == self.batch.axis for i in inputs)

    def found(self, doubt: bool = False, warning: str | None = None, before: "Answer | None" = None) -> Found:
        """The layout of every layer that has one.

        Args:
            doubt: the other axis of the inputs may be the batch too.
            warning: what to warn of in any case.
            before: what was seen to move with inputs that are held here is shared by all samples.
        """
        held = () if before is None else (*before.own, *before.mixed)
        layouts: dict[str, Layout | None] = {name: own for name, own in self.own.items() if name in self.layers}
        guessed, routed = [], set()
        for name in (*self.mixed, *self.still):
            if name not in self.layers:
                continue
            axis = None if name in self.still and name in held else self._by_length(name)
            if axis is None and name in self.mixed:
                routed.add(name)
                continue
            layouts[name] = None if axis is None else Layout(axis)
            if axis is not None and (doubt or (name in self.still and self.batch.square and axis != self.batch.axis)):
                guessed.append(f"axis {axis} of the input of layer '{name}', of shape {tuple(self.shapes[name][0])},")
        if not guessed or warning is not None:
            return Found(layouts, frozenset(self.own), self.batch.axis, warning, frozenset(routed))
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
