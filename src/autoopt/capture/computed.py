"""What a watched pass computes from parameters alone, and how that meets the samples.

A tensor that was expanded or indexed to a row for each sample is the samples' as it stands; of any other one each
sample gets a copy, whose gradient is its contribution.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autoopt.capture.copies import Copies, Rows
from autoopt.capture.layout import FOLDED, PRODUCTS, RESHAPES, VIEWS
from autoopt.capture.ledger import sources
from autoopt.capture.marks import tensors_in
from autoopt.capture.routes import JOINING, keeps
from autoopt.capture.rowwise import in_place, rows_of

if TYPE_CHECKING:
    from autoopt.capture.watch import Watch

COPYING = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
RANDOM = {"rrelu", "bernoulli", "multinomial", "poisson", "normal", "gumbel_softmax"}
UNCHANGED = {"to", "type_as", "clone", "contiguous", "float", "double", "half", "bfloat16"}
APART = {"layer", "layer_norm", "rms_norm", "embedding"} | UNCHANGED | COPYING | VIEWS | RESHAPES | PRODUCTS | JOINING


@dataclass
class Made:
    """What is known of a tensor that was computed from parameters alone."""

    alike: bool  # its rows are copies of one, one for each sample
    again: Callable[[], Any] | None = None  # computes it with samples in place of what has a row for each
    sure: bool = False  # it has a row for each sample, and not only as many rows
    used: bool = False  # it met samples
    copied: tuple[Tensor, int] | None = None  # what it is copies of, one for each sample on this axis, not the first
    versions: tuple[int, ...] = ()  # of what it was made of, and its own, when it was


def derive(watch: "Watch", name: str, tensors: list[Tensor], result: Any, again: Callable[[], Any] | None) -> Any:
    """A call with parameters and constants alone; `again` runs it as one with samples."""
    watch.events += 1
    changed, first = in_place(name), tensors[0]
    origin = watch.made.get(first)
    if changed and origin is not None and origin.used:
        raise watch.error(f"'{name}' changes in place", [first])
    for tensor in tensors_in((first if changed else result,)):
        if not changed and any(tensor is each for each in tensors):  # as it is, by `to` or `contiguous`
            continue
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            spread = name in COPYING and (first.dim() < tensor.dim() or first.shape[0] == 1)
            alike = (name in UNCHANGED and origin is not None and origin.alike) or (
                spread and tensor.shape[0] == watch.samples
            )
            kept = again is not None and not changed and tensor.shape[:1] == (watch.samples,)
            sure = kept and any(map(functools.partial(by_sample, watch), tensors))
            copied = None if changed or name not in COPYING else _copied(first, tensor, watch.samples)
            versions = _version(first), _version(tensor)
            watch.made.put(tensor, Made(alike, None if changed else again, alike or sure, False, copied, versions))
    return result


def as_samples(
    watch: "Watch", name: str, tensors: list[Tensor], call: Callable[[Any, Any], Any], args: Any, kwargs: Any
) -> Callable[[], Any] | None:
    """The call with samples in place of what has a row for each, or else of constants that have as many.

    None if there are none such, or if it would draw other random numbers.
    """
    sure = any(map(functools.partial(by_sample, watch), tensors))
    rows = [] if sure else [t for t in tensors if not watch.derived(t) and rows_of(t, watch.samples)]
    if _random(name) or not (rows or sure) or not (name in APART or keeps(name)):  # as cumsum(0): rows meet
        return None
    versions = list(map(_version, tensors))

    @functools.cache  # what is used twice runs once
    def run() -> Any:
        if list(map(_version, tensors)) != versions:  # changed in place since
            return None
        own = tree_map(functools.partial(given, watch), (args, kwargs))
        for tensor in rows:
            watch.layouts.put(tensor, 0 if tensor.shape[0] == watch.samples else FOLDED)
        try:
            return call(*own)
        finally:
            for tensor in rows:
                watch.layouts.put(tensor, None)

    return run


def of_any_strides(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """What does the same as a function where the samples' rows may lie in memory otherwise."""
    if func is Tensor.view and len(args) > 1 and not isinstance(args[1], torch.dtype):
        return Tensor.reshape
    return Tensor.reshape_as if func is Tensor.view_as and len(args) > 1 else func


def given(watch: "Watch", value: Any) -> Any:
    """What leaves the calls that are seen: if it has a row for each sample, these are the samples'.

    That it was made so must be known. A parameter that is as long as the batch by chance stays what it is.
    """
    if not isinstance(value, Tensor) or not torch.is_grad_enabled() or not by_sample(watch, value):
        return value
    made: Made = watch.made.get(value)
    if made.again is not None and not made.alike and with_samples(watch, value) is None:
        return value
    value = by_row(watch, value).squeeze(1)
    watch.layouts.put(value, 0)
    return value


def by_sample(watch: "Watch", tensor: Tensor) -> bool:
    """Whether it is known to be computed from parameters alone with a row for each sample."""
    made: Made | None = watch.made.get(tensor)
    return made is not None and made.sure


def with_samples(watch: "Watch", derived: Tensor) -> Tensor | None:
    """It, computed with samples, if their rows belonged to them already where it was."""
    made: Made | None = watch.made.get(derived)
    found = None if made is None or made.again is None else made.again()
    fits = isinstance(found, Tensor) and found.shape == derived.shape and watch.layout(found) in (0, FOLDED)
    return found if fits else None


def by_row(watch: "Watch", derived: Tensor) -> Tensor:
    """It, whose rows are the samples': (samples, rows, *rest)."""
    made = use(watch, derived)
    if made is not None and made.alike and made.versions[1] == _version(derived):
        return copies(watch, derived[:1])
    found = with_samples(watch, derived)
    if found is not None:
        rows: Tensor = found.unflatten(0, (watch.samples, -1))
        return rows
    own: Tensor = Rows.apply(derived, watch.samples, watch.ledger, watch.sole)  # type: ignore[no-untyped-call]
    return own


def copies(watch: "Watch", derived: Tensor) -> Tensor:
    """It, once for each sample."""
    use(watch, derived)
    each: Tensor = Copies.apply(derived, watch.samples, watch.ledger, watch.sole)  # type: ignore[no-untyped-call]
    return each


def as_copies(watch: "Watch", derived: Tensor, axis: int) -> Tensor:
    """The samples' own, if it is copies along their axis of what was computed from parameters."""
    made: Made | None = watch.made.get(derived)
    if made is None or made.copied is None or made.copied[1] != axis:
        return derived
    origin, _ = made.copied
    if (_version(origin), _version(derived)) != made.versions:  # changed in place since
        return derived
    own = copies(watch, origin).squeeze(1 + axis).movedim(0, axis)
    watch.layouts.put(own, axis)
    return own


def use(watch: "Watch", derived: Tensor) -> Made | None:
    """Count that it meets samples; what is known of it."""
    made: Made | None = watch.made.get(derived)
    if made is not None:
        made.used = True
    for parameter in sources(derived):
        watch.uses[parameter] += 2 if watch.bare.borrowed(parameter) else 1  # the layer that holds it uses it, too
    return made


def _copied(first: Tensor, tensor: Tensor, samples: int) -> tuple[Tensor, int] | None:
    """A tensor and the axis, behind the first, along which another one holds so many copies of it."""
    if tensor.dim() != first.dim():
        return None
    grown = [axis for axis in range(first.dim()) if tensor.shape[axis] != first.shape[axis]]
    axis = grown[0] if len(grown) == 1 else 0
    return (first, axis) if axis and (first.shape[axis], tensor.shape[axis]) == (1, samples) else None


def _version(tensor: Tensor) -> int:
    """Tensors from inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def _random(name: str) -> bool:
    """Whether a function of that name draws other numbers when it runs again."""
    return "dropout" in name or name in RANDOM
