"""Calls of a watched pass in which samples meet parameters: they run by a rule, by rows, or sample by sample."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from autoopt.capture import computed, ruled, scattered
from autoopt.capture.layout import FOLDED, LOST
from autoopt.capture.marks import tensors_in
from autoopt.capture.routes import JOINING, elementwise
from autoopt.capture.rowwise import Call, Plan, compact, differentiable, in_front, make_plan

if TYPE_CHECKING:
    from autoopt.capture.watch import Watch


def meet(watch: "Watch", func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call in which samples meet parameters."""
    watch.events += 1
    known = ruled.rule_for(name, args, kwargs)
    if known is not None and _fits(watch, known):
        return _by_rule(watch, known)
    rewritten = ruled.rewritten(name, args, watch.constant)
    if rewritten is not None:
        with watch:
            return rewritten(*args, **kwargs)
    call = Call.of(func, args, kwargs, watch.derived, watch.layout, watch.samples)
    own = _with_copies(watch, call, args, kwargs)
    if own is not None:
        with watch:
            return call.run(own)
    owners = _routed(watch, call)
    if owners is not None:
        return by_owners(watch, call, owners)
    lost = [call.leaves[i] for i, layout in call.layouts.items() if layout == LOST]
    if lost and all(map(watch.routes.gather, lost)):
        call = Call.of(func, args, kwargs, watch.derived, watch.layout, watch.samples)
    return _one_by_one(watch, call)


def _with_copies(watch: "Watch", call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """What a call is given, with parameters that were copied for the samples along their axis as the samples' own.

    None if there are none. It has to keep that axis as it is: rows of a matrix may be as many as the samples by chance.
    """
    places = {(call.leaves[i].dim(), layout) for i, layout in call.layouts.items()}
    if call.in_place or len(places) != 1:
        return None
    dims, axis = places.pop()
    along = kwargs.get("dim", args[1] if len(args) > 1 else 0) if call.name in JOINING - {"stack"} else None
    if not (elementwise(call.name) if along is None else along % dims != axis):
        return None
    own = [
        computed.as_copies(watch, leaf, axis) if i in call.derived and leaf.dim() == dims else leaf
        for i, leaf in enumerate(call.leaves)
    ]
    return own if any(map(operator.is_not, own, call.leaves)) else None


def _routed(watch: "Watch", call: Call) -> Tensor | None:
    """The sample of each row, if it is rows that were routed that meet parameters."""
    rows = [call.leaves[i] for i, layout in call.layouts.items() if layout == LOST]
    first = next((tensor for tensor in rows if watch.routes.known(tensor)), None)
    owners = None if first is None else watch.routes.owner(first)
    if first is None or owners is None or not scattered.rowwise(call, owners):
        return None
    # what has no gradient, as the places where the rows of an expert end, belongs to no sample
    others = [t for i in call.layouts if differentiable(t := call.leaves[i])]
    same = all((other := watch.routes.owner(t)) is not None and other.shape == owners.shape for t in others)
    single = watch.routes.single(first)
    return owners if same and all(watch.routes.single(t) == single for t in others) else None


def by_owners(watch: "Watch", call: Call, owners: Tensor) -> Tensor:
    """Run a call with rows, whose `owners` are the samples that they belong to."""
    for i in call.derived:
        computed.use(watch, call.leaves[i])
    result = scattered.run(call, owners, watch.ledger, watch.sole)
    dims = max(call.leaves[i].dim() for i in call.layouts)
    if owners.dim() == 0:
        watch.routes.lies(result, LOST, single=watch.routes.single(call.leaves[min(call.layouts)]))
        return result
    deeper = call.name in ("__getitem__", "embedding")
    if result.shape[: owners.dim()] != owners.shape or not (deeper or result.dim() == dims):
        _refuse(watch, call)  # rows were broadcast over something else
    watch.routes.lies(result, LOST, owners)
    return result


def _fits(watch: "Watch", known: ruled.Known) -> bool:
    layout = watch.layout(known.x)
    return (
        (layout == 0 or (layout == FOLDED and known.operation.positional))
        and not watch.derived(known.x)
        and watch.derived(known.weight)
        and (known.bias is None or watch.constant(known.bias))
    )


def _by_rule(watch: "Watch", known: ruled.Known) -> Tensor:
    layout = watch.layout(known.x)
    for tensor in (known.weight, known.bias):
        if tensor is not None:
            computed.use(watch, tensor)
    if layout == FOLDED:
        known = known._replace(x=known.x.unflatten(0, (watch.samples, -1)))
    result = ruled.run(known, watch.ledger, watch.sole)
    result = result.flatten(0, 1) if layout == FOLDED else result
    watch.layouts.put(result, layout)
    return result


def _one_by_one(watch: "Watch", call: Call) -> Any:
    if call.in_place and 0 in call.derived:
        raise watch.error(f"'{call.name}' changes in place", [call.leaves[0]])
    key = call.key()
    if key not in watch.bare.plans:
        watch.bare.plans[key] = make_plan(call) or _refuse(watch, call)
    plan = watch.bare.plans[key]
    if plan.free:
        return watch.note(call.run(call.leaves), [(call.leaves[i], layout) for i, layout in call.layouts.items()])
    values = list(call.leaves)
    if call.derived <= plan.by_row and not call.in_place:  # then their rows alone have to be the samples'
        for i in call.derived:
            values[i] = computed.by_row(watch, values[i]).flatten(0, 1)
        result = call.run(values)
        for tensor, layout in zip(tensors_in((result,)), plan.layouts, strict=True):
            watch.layouts.put(tensor, layout)
        return result
    for i, leaf in enumerate(values):
        if i in call.derived:
            values[i] = computed.by_row(watch, leaf) if i in plan.by_row else computed.copies(watch, leaf)
        elif i in call.layouts or i in plan.by_row:
            values[i] = in_front(compact(call, leaf), call.layouts.get(i, FOLDED), call.samples)
    parts = plan.run(call, values)
    if call.in_place:
        results, given = [call.leaves[0]], None if call.name == "__setitem__" else call.leaves[0]
    else:
        results = plan.results(call, parts)
        assert plan.spec is not None
        given = results[0] if plan.spec.is_leaf() else tree_unflatten(results, plan.spec)
    for tensor, layout in zip(results, plan.layouts, strict=True):
        watch.layouts.put(tensor, layout)
    return given


def _refuse(watch: "Watch", call: Call) -> Plan:
    raise watch.error(f"{call.refusal()}, in a call with", [call.leaves[i] for i in call.derived])
