"""Layers that have rules, where a Watch follows the pass that they are called in."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from autoopt.capture import computed, meeting, scattered
from autoopt.capture.layout import FOLDED, LOST, axis_of, folded, folds
from autoopt.capture.marks import tensors_in
from autoopt.capture.rerun import sample_axes
from autoopt.capture.rowwise import Call, rows_of
from autoopt.capture.site import Site

if TYPE_CHECKING:
    from autoopt.capture.watch import Watch


def run(watch: "Watch", site: Site, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A layer's pass, by `forward`; it is told where its samples are, or tells."""
    site.current.met.add(site.name)
    tensors = list(tensors_in((*args, *kwargs.values())))
    packed = any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values()))
    same = bool(tensors) and all(map(watch.constant, tensors))
    routed = (site.routed and (watch.abandoned or not same)) or any(map(watch.routes.known, tensors))
    if watch.samples == 1 and site.takes_rows():
        routed |= tensors[0].shape[:1] == (0,)  # an expert that is given none
    if routed and not packed:
        return _routed_layer(watch, site, *tensors)
    if watch.abandoned:
        return forward(*args, **kwargs)
    if same:
        return _same_for_all(watch, site, forward, tensors, args, kwargs)
    if any(map(watch.derived, tensors)):
        args, kwargs = tree_map(functools.partial(computed.given, watch), (args, kwargs))
        if (_knows(site) or isinstance(site.layer, nn.RNNCellBase)) and not packed:
            args, kwargs = _by_samples(watch, site, args, kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
    sampled = [(tensor, layout) for tensor in tensors if (layout := watch.layout(tensor)) is not None]
    tensor, layout = sampled[0]
    if watch.samples == 1:
        with _as_one(watch, site, tensor), torch._C.DisableTorchFunction():
            result = forward(*args, **kwargs)
        return _note_parts(watch, site, result, sampled) if _knows(site) else watch.note(result, sampled)
    if site.settled and not _knows(site):
        sampled[0] = tensor, _seen(site, tensor, watch.samples)
    elif not packed:
        sampled[0] = tensor, _place(watch, site, tensor, layout)
    with torch._C.DisableTorchFunction():
        result = forward(*args, **kwargs)
    return _note_parts(watch, site, result, sampled) if _knows(site) else watch.note(result, sampled)


@contextlib.contextmanager
def _as_one(watch: "Watch", site: Site, tensor: Tensor) -> Iterator[None]:
    """Have a layer take all rows for those of the one sample. It learns nothing from that for other batches."""
    axes = sample_axes(site.layer, tensor.shape)
    if _knows(site) or site.folded or 0 not in axes or tensor.shape[site.axis] == 1:
        yield
        return
    watch.needed = True
    watch.events += 1
    before = site.axis, site.fold, site.strided
    site.axis, site.fold, site.strided = 0, tensor.shape[0], False
    try:
        yield
    finally:
        site.axis, site.fold, site.strided = before


def _same_for_all(
    watch: "Watch", site: Site, forward: Callable[..., Any], tensors: list[Tensor], args: Any, kwargs: Any
) -> Any:
    """The pass of a layer that sees the same for all samples: what it gives is computed from parameters alone."""
    watch.needed = True
    watch.events += 1
    name = "dropout" if site.layer.training and getattr(site.layer, "dropout", None) else "layer"

    def again(args: Any, kwargs: Any) -> Any:
        return run(watch, site, forward, *args, **kwargs)

    with_samples = computed.as_samples(watch, name, tensors, again, args, kwargs)
    with torch._C.DisableTorchFunction():
        result = site.plain.forward(site.layer, *args, **kwargs)
    return computed.derive(watch, name, tensors, result, with_samples)


def _by_samples(watch: "Watch", site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a layer that has an axis for samples in each, where they come from parameters: learned first
    states, and queries of a layer that takes (time, batch, features)."""
    cell, states = isinstance(site.layer, nn.RNNCellBase), isinstance(site.layer, nn.RNNBase)
    own, dims = (0, 2) if cell else (0 if site.layer.batch_first else 1, 3)
    if site.strided or (cell and not _in_blocks(watch, (args, kwargs))):
        return args, kwargs

    def by_row(axis: int, value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.dim() == dims and rows_of(value.movedim(axis, 0), watch.samples)
        if not fits or not watch.derived(value) or not torch.is_grad_enabled():
            return value
        return computed.by_row(watch, value.movedim(axis, 0)).flatten(0, 1).movedim(0, axis)

    def of(place: int | str, value: Any) -> Any:
        return tree_map(functools.partial(by_row, 1 if states and place not in (0, "input") else own), value)

    return tuple(itertools.starmap(of, enumerate(args))), {key: of(key, value) for key, value in kwargs.items()}


def _in_blocks(watch: "Watch", given: Any) -> bool:
    """Whether the rows of each sample lie together in all that holds samples."""
    layouts = {watch.layout(x) for x in tree_leaves(given) if isinstance(x, Tensor) and not watch.derived(x)}
    return layouts <= {None, 0, FOLDED}


def _routed_layer(watch: "Watch", site: Site, x: Tensor, *others: Tensor) -> Tensor:
    """Run a layer that is given rows of any number, in any order."""
    watch.needed = True
    watch.events += 1
    site.route()  # if it was found to have a layout, that was by chance
    owners = None if watch.abandoned or others else watch.routes.owner(x)
    if owners is None or owners.dim() > x.dim() - scattered.together(site.layer):
        raise site.unknown(x)
    with torch._C.DisableTorchFunction():
        call = Call.of(*scattered.as_call(site.layer, x), {}, watch.derived, watch.layout, watch.samples)
        result = meeting.by_owners(watch, call, owners)
    if not watch.routes.known(x):  # it takes others, but these lie as ever
        watch.routes.lies(result, watch.layouts.get(x))
    return result


def _place(watch: "Watch", site: Site, tensor: Tensor, layout: int) -> int:
    """Tell a layer where its samples are, or be told."""
    own = _own_layout(watch, site, tensor, layout)
    if LOST in (own, layout) or own == layout:
        return own if own is not None and site.settled else layout
    watch.events += 1
    if own is None:
        watch.bare.placed.add(site)
        site.axis = axis_of(layout)
        site.fold = tensor.shape[site.axis] // watch.samples if folds(layout) else 1
        watch.needed |= layout != 0
        return layout
    # The first axis of what the module was called with is not the batch.
    if watch.bare.holding:
        raise RuntimeError(
            f"layer '{site.name}' takes the samples on axis {own}, where axis {watch.axis} of the inputs of module "
            f"'{watch.module}' does not arrive: statistics of its parameters need the batch as first axis of its "
            "inputs. Transpose them inside of the module, or leave them to another optimizer through param_groups."
        )
    watch.abandoned = True
    for placed in watch.bare.placed:
        placed.axis, placed.fold = 0, 1
    watch.bare.placed.clear()
    return own


def _own_layout(watch: "Watch", site: Site, tensor: Tensor, layout: int) -> int | None:
    """Where a layer has the samples by itself, or was seen to have them when one of them was changed."""
    if not _knows(site):
        return site.axis if site.axis and site not in watch.bare.placed else None
    axis = 0 if site.layer.batch_first or tensor.dim() < 3 else 1
    if site.folded:
        return _seen(site, tensor, watch.samples)
    # Of the first axis several rows may be one sample.
    return None if axis == 0 and (layout == FOLDED or site in watch.bare.placed) else axis


def _note_parts(watch: "Watch", site: Site, result: Any, sampled: list[tuple[Tensor, int]]) -> Any:
    """The same of a layer that gives states (levels, rows, features) or weights (rows, ...) beside its output."""
    output, *others = result
    watch.note(output, sampled)
    axis, layout = int(isinstance(site.layer, nn.RNNBase)), sampled[0][1]
    for tensor in tensors_in(others):
        single = layout >= 0 and tensor.dim() > 2 and tensor.shape[axis] == watch.samples
        watch.layouts.put(tensor, axis if single else FOLDED if layout == FOLDED and axis == 0 else LOST)
    return result


def _knows(site: Site) -> bool:
    """Whether a layer knows the axis of the samples by itself, as recurrent layers and attention do."""
    return getattr(site.layer, "batch_first", None) is not None


def _seen(site: Site, tensor: Tensor, samples: int) -> int:
    """Where a layer was seen to have the samples when one of them was changed."""
    single = not site.folded or tensor.shape[site.axis] == samples
    return site.axis if single else LOST if site.strided else folded(site.axis)
