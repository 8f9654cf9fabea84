"""What a probe's runs say of where the samples lie."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from autoopt.capture.batch import Batch
from autoopt.capture.rerun import OUTPUT, Seen, Trace, sample_axes

Path = tuple[int | str, int]
"""An input of a module: position or name of the argument, and number of the leaf in it."""

Moved = dict[int, list[list[int]]]
"""Axis -> for each change the indices at which a layer's input moved."""


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
