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
  shared: where samples mix, the length of another one is tried as their number. What cannot be told, as where a model
  returns one row for each row of another input, is a doubt.
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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from autoopt.capture.answer import Answer, Found, Path
from autoopt.capture.batch import Batch, batch_size
from autoopt.capture.rerun import (
    KNOWN,
    OUTPUT,
    CannotRunError,
    Trace,
    as_before,
    rerun,
    same_random_numbers,
    undisturbed,
)


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

    def ask(self, axis: int, *, lead: int | None = None, held: Collection[int] = ()) -> Answer | None:
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

    def judge(self) -> tuple[Answer, Found]:
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
            columns = self._columns(first)
            rival = next((other.batch.lead for other in elsewhere if other.clean), None)
            warn = first.batch.or_rows_of if rival in columns else first.batch.or_rather
            return first, first.found(warning=None if rival is None else warn(rival))
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
        return best, best.found(doubt=bool(other.own) or best is second, warning=warning)

    def _columns(self, first: Answer) -> list[int]:
        """Inputs of another length that may have a row for each of the matrix that is returned."""
        shapes = [shape for name, seen in first.shapes.items() if name.startswith(OUTPUT) for shape in seen]
        if first.returned != {1} or any(len(shape) != 2 for shape in shapes):
            return []
        lengths = self.leaves[first.batch.lead].shape
        return [i for i in self.tensors if first.batch.axes[i] is None and self.leaves[i].shape[0] not in lengths]

    def _alone(self, held: Sequence[int], matters: bool) -> Answer | None:
        """The leading input alone is changed, and of the others those with which nothing mixes either."""
        alone = self.ask(0, held=held) if self.agree(bool(held)) else None
        for i in self.tensors:
            fewer = [other for other in held if other != i]
            if self.agree(matters and alone is not None and alone.clean and len(held) > len(fewer) > 0):
                wider = self.ask(0, held=fewer)
                if wider is not None and wider.clean and len(held) > len(fewer) > 0:
                    alone, held = wider, fewer
        return alone

    def _rest(self, first: Answer | None, wanted: bool) -> Answer | None:
        """All but the leading input are changed."""
        return self.ask(0, held=[] if first is None else [first.batch.lead]) if self.agree(wanted) else None

    def _elsewhere(self, first: Answer | None, second: Answer | None, mixed: bool) -> list[Answer]:
        """Other inputs lead: their length may be the number of samples, where that of the first one is not plain."""
        rivals: list[int] = []
        if first is not None and not mixed:
            rivals = [i for i in first.batch.others if first.batch.axes[i] == 1]
            rivals += first.batch.twice if first.returned == {1} else []
            rivals += self._columns(first)
        elif first is not None and (second is None or second.mixed or second.batch.lead != first.batch.lead):
            later = second.batch.lead if second is not None else first.batch.lead
            rivals = [i for i in self.tensors if first.batch.axes[i] != 0 and self.leaves[i].dim() > 1]
            rivals += [later] if later != first.batch.lead else []
        held = [] if first is None else [first.batch.lead]
        answers = [self.ask(0, lead=i, held=held) for i in self.tensors if self.agree(i in rivals)]
        return [answer for answer in answers if answer is not None and answer.batch.lead in rivals]


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
                with as_before(copies):
                    traces.append(rerun(model, args, kwargs, layers))
    return traces
