"""Looks at every torch function of a forward pass, and runs those in which samples meet parameters sample by sample.

It follows which tensors were computed from parameters alone and which hold samples, and where (`layout`). Where the two
meet, the call goes to a rule (`ruled`) or runs with a copy of the parameter for each sample (`rowwise`), so that the
gradients of the copies are the contributions c_i. Everything else runs as it is. The parameters stay in their places
and no tensor changes its type, so nothing can leak into the model.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map, tree_unflatten

from autoopt.capture import ruled, scattered
from autoopt.capture.compiling import compiled
from autoopt.capture.copies import Copies, Rows
from autoopt.capture.layout import FOLDED, LOST, PRODUCTS, RESHAPES, VIEWS, axis_of, carried, folded, folds, follow
from autoopt.capture.ledger import sources
from autoopt.capture.marks import Made, Marks, tensors_in
from autoopt.capture.routes import INTO, JOINING, Routes, keeps
from autoopt.capture.rowwise import Call, Plan, compact, differentiable, in_front, in_place, make_plan, rows_of
from autoopt.capture.site import Site

if TYPE_CHECKING:
    from autoopt.capture.bare import Bare

ASKING = {"__get__", "dim", "size", "__len__", "numel", "is_floating_point", "is_contiguous", "stride", "__bool__"}
METADATA = {"view_as", "reshape_as", "expand_as", "type_as", "to", "zeros_like", "ones_like", "empty_like"}
COPYING = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
RANDOM = {"rrelu", "bernoulli", "multinomial", "poisson", "normal", "gumbel_softmax"}
UNCHANGED = {"to", "type_as", "clone", "contiguous", "float", "double", "half", "bfloat16"}
APART = {"layer", "layer_norm", "rms_norm", "embedding"} | UNCHANGED | COPYING | VIEWS | RESHAPES | PRODUCTS | JOINING


class Watch(TorchFunctionMode):
    """Follows samples and parameters through one forward pass of a module.

    Args:
        bare: whose modules are watched.
        inputs: the tensors that the module was called with, but those that all samples share.
        module: the name of the module, for errors.
        axis: that of the samples in the inputs. Inputs that have as many rows on the other one of the first two axes
            have them there; all others hold none.
    """

    def __init__(self, bare: "Bare", inputs: Sequence[Tensor], module: str, axis: int = 0) -> None:
        super().__init__()
        self.bare, self.ledger, self.module, self.axis = bare, bare.ledger, module, axis
        self.samples = next((tensor.shape[axis] for tensor in inputs if tensor.dim() > axis), 0)
        self.alone, self.trained = bare.alone(), bare.trained()
        self.uses: Counter[nn.Parameter] = Counter()  # parameters that samples met
        self.needed = False  # there are layers with rules that need it, too
        self.abandoned = False  # the axis is another one, and nothing depends on it
        self.events = 0  # calls with parameters outside of their layers, and layers that had to be told something
        self._around: list[tuple[nn.Module, int]] = []  # modules in which there were some that can be watched alone
        self.layouts = Marks()  # of tensors that hold samples
        self.routes = Routes(self.layouts, self.samples)  # of rows that lie apart
        self.made = Marks()  # of tensors computed from parameters alone
        for tensor in inputs:
            places = [a for a in (axis, 1 - axis) if tensor.dim() > a and tensor.shape[a] == self.samples]
            if places:
                self.layouts.put(tensor, places[0])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.abandoned or name in ASKING:
            result = func(*args, **kwargs)
            if self.abandoned or not isinstance(result, Tensor):
                return result
        tensors = list(tensors_in((*args, *kwargs.values())))
        if name in METADATA:
            tensors = tensors[:1]  # of the others only shape and type are read
        if torch.is_grad_enabled() and any(map(self.derived, tensors)):
            if any(self.layout(tensor) is not None for tensor in tensors if not _chosen(name, tensor, args)):
                return self._meet(func, name, args, kwargs)
            call = functools.partial(self.__torch_function__, func, types)
            again = self._as_samples(name, tensors, call, args, kwargs)
            return self._derive(name, tensors, func(*args, **kwargs), again)
        blank = name in INTO and self._blank(args[0] if args else kwargs["input"])  # before the call
        result = func(*args, **kwargs)
        self.routes.count(name, args, result)
        if name == "__setitem__" and isinstance(args[2], Tensor) and self.layout(args[2]) is not None:
            self.routes.written(*args, blank=blank)
        sampled = [(tensor, layout) for tensor in tensors if (layout := self.layout(tensor)) is not None]
        found = list(tensors_in((result,))) if sampled else []
        if found:
            steady = self.routes.one_of_each(name, args, kwargs)
            layouts = [0] if steady else follow(func, args, kwargs, sampled, found, self.samples)
            if LOST in layouts:
                self.routes.follow(name, args, kwargs, [tensor for tensor, _ in sampled], found, blank=blank)
            for tensor, layout in zip(found, layouts, strict=True):
                self.layouts.put(tensor, layout)
        return result

    # What is known of a tensor.

    def derived(self, tensor: Tensor) -> bool:
        """Whether it was computed from observed parameters alone, and leads to them."""
        if tensor in self.ledger.names:
            return tensor.requires_grad
        return self.made.get(tensor) is not None

    def layout(self, tensor: Tensor) -> int | None:
        """Where the samples are; None for what holds none."""
        known: int | None = self.layouts.get(tensor)
        if known is None and tensor.grad_fn is not None and not self.derived(tensor):
            # From a function that nobody saw, as autograd.Function.apply: constants have no graph.
            known = 0 if tensor.dim() and tensor.shape[0] == self.samples else LOST
        return known

    def constant(self, tensor: Tensor) -> bool:
        """Whether the samples have no part in it."""
        return self.layout(tensor) is None

    def _blank(self, tensor: Tensor) -> bool:
        """Whether it holds nothing of the samples, even if it was made from some."""
        return self.constant(tensor) or self.routes.blank(tensor)

    def sole(self, derived: Tensor) -> bool:
        """Whether the parameters that it was computed from have no other use in the backward pass that asks."""
        origins = [parameter for parameter in sources(derived) if parameter in self.ledger.names]
        seen = all(self.uses[p] == 1 and self.ledger.names[p] in self.ledger.audit.done for p in origins)
        return seen and self.alone()

    # What layers with rules, and the caller of the module, see.

    def layer(self, site: Site, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer that has a rule of its own."""
        site.current.met.add(site.name)
        tensors = list(tensors_in((*args, *kwargs.values())))
        packed = any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values()))
        same = bool(tensors) and all(map(self.constant, tensors))
        routed = (site.routed and (self.abandoned or not same)) or any(map(self.routes.known, tensors))
        if routed and not packed:
            return self._routed_layer(site, *tensors)
        if self.abandoned:
            return run(*args, **kwargs)
        if same:
            # It sees the same for all samples, so what it gives is computed from parameters alone.
            self.needed = True
            self.events += 1
            name = "dropout" if site.layer.training and getattr(site.layer, "dropout", None) else "layer"
            call = functools.partial(self.layer, site, run)
            again = self._as_samples(name, tensors, lambda args, kwargs: call(*args, **kwargs), args, kwargs)
            with torch._C.DisableTorchFunction():
                result = site.plain.forward(site.layer, *args, **kwargs)
            return self._derive(name, tensors, result, again)
        if any(map(self.derived, tensors)):
            args, kwargs = tree_map(self.given, (args, kwargs))
            if _knows(site) and not packed:
                args, kwargs = self._by_samples(site, args, kwargs)
            tensors = list(tensors_in((*args, *kwargs.values())))
        sampled = [(tensor, layout) for tensor in tensors if (layout := self.layout(tensor)) is not None]
        tensor, layout = sampled[0]
        if site.settled and not _knows(site):
            sampled[0] = tensor, _seen(site, tensor, self.samples)
        elif not packed:
            sampled[0] = tensor, self._place(site, tensor, layout)
        with torch._C.DisableTorchFunction():
            result = run(*args, **kwargs)
        return self._note_parts(site, result, sampled) if _knows(site) else self._note(result, sampled)

    def _by_samples(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a layer that has an axis for samples in each, where they come from parameters: learned first
        states, and queries of a layer that takes (time, batch, features)."""
        own, states = 0 if site.layer.batch_first else 1, isinstance(site.layer, nn.RNNBase)

        def by_row(axis: int, value: Any) -> Any:
            fits = isinstance(value, Tensor) and value.dim() == 3 and value.shape[axis] == self.samples
            if not fits or not self.derived(value) or not torch.is_grad_enabled():
                return value
            return self._by_row(value.movedim(axis, 0)).squeeze(1).movedim(0, axis)

        def of(place: int | str, value: Any) -> Any:
            return tree_map(functools.partial(by_row, 1 if states and place not in (0, "input") else own), value)

        return tuple(itertools.starmap(of, enumerate(args))), {key: of(key, value) for key, value in kwargs.items()}

    def _routed_layer(self, site: Site, x: Tensor, *others: Tensor) -> Tensor:
        """Run a layer that is given rows of any number, in any order."""
        self.needed = True
        self.events += 1
        site.route()  # if it was found to have a layout, that was by chance
        owners = None if self.abandoned or others else self.routes.owner(x)
        if owners is None:
            raise site.unknown(x)
        with torch._C.DisableTorchFunction():
            call = Call.of(*scattered.as_call(site.layer, x), {}, self.derived, self.layout, self.samples)
            result = self._by_owners(call, owners)
        if not self.routes.known(x):  # it takes others, but these lie as ever
            self.routes.lies(result, self.layouts.get(x))
        return result

    def _place(self, site: Site, tensor: Tensor, layout: int) -> int:
        """Tell a layer where its samples are, or be told."""
        own = self._own_layout(site, tensor, layout)
        if LOST in (own, layout) or own == layout:
            return own if own is not None and site.settled else layout
        self.events += 1
        if own is None:
            self.bare.placed.add(site)
            site.axis = axis_of(layout)
            site.fold = tensor.shape[site.axis] // self.samples if folds(layout) else 1
            self.needed |= layout != 0
            return layout
        # The first axis of what the module was called with is not the batch.
        if self.bare.holding:
            raise RuntimeError(
                f"layer '{site.name}' takes the samples on axis {own}, where axis {self.axis} of the inputs of module "
                f"'{self.module}' does not arrive: statistics of its parameters need the batch as first axis of its "
                "inputs. Transpose them inside of the module, or leave them to another optimizer through param_groups."
            )
        self.abandoned = True
        for placed in self.bare.placed:
            placed.axis, placed.fold = 0, 1
        self.bare.placed.clear()
        return own

    def _own_layout(self, site: Site, tensor: Tensor, layout: int) -> int | None:
        """Where a layer has the samples by itself, or was seen to have them when one of them was changed."""
        if not _knows(site):
            return site.axis if site.axis and site not in self.bare.placed else None
        axis = 0 if site.layer.batch_first or tensor.dim() < 3 else 1
        if site.folded:
            return _seen(site, tensor, self.samples)
        # Of the first axis several rows may be one sample.
        return None if axis == 0 and (layout == FOLDED or site in self.bare.placed) else axis

    def part(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that holds layers. Where nothing but these met parameters before, they need not be watched.

        One whose results have the samples anywhere but on the first axis is watched on: that must not be guessed.
        """
        tensors = list(tensors_in((*args, *kwargs.values())))
        with torch._C.DisableTorchFunction():  # what is asked here the model does not ask
            sampled = [(tensor, layout) for tensor in tensors if (layout := self.layout(tensor)) is not None]
            derived = any(map(self.derived, tensors))
        if self.abandoned or derived or not sampled:
            return run(*args, **kwargs)
        key = kind_of(module, args, kwargs, self.trained)
        on_top = _get_current_function_mode() is self  # else a mode of the user's is, which is to see what it sees
        quiet = self.bare.quiet(key) and self.bare.complete(module, self.trained)
        if quiet and on_top and not self.ledger.sampler.exact:
            self.ledger.current.watch = None
            try:
                with _pop_mode_temporarily(), compiled():
                    result = run(*args, **kwargs)
            finally:
                self.ledger.current.watch = self
            return self._note(result, sampled)
        before, plain = self.events, self._begins_anew(tensors)
        result = run(*args, **kwargs)
        if not torch.is_grad_enabled() or any(self.layouts.get(tensor) != 0 for tensor in tensors_in((result,))):
            return result
        if self.events > before:
            self.bare.heard(key, quiet=False)
            self._around += [(module, self.events - before)] if plain else []
        elif not (self.bare.holds(module) or self.ledger.sampler.exact):
            self.bare.heard(key, quiet=True)
        return result

    def _begins_anew(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a Watch that begins with these would take them for what they are, however many samples there are."""
        return self.axis == 0 and all(self.layout(tensor) == 0 for tensor in tensors if tensor.dim() > 0)

    def around(self) -> nn.Module | None:
        """The innermost module, called once, in which all was that has to be watched; None: that is the whole model."""
        return next((module for module, events in self._around if events == self.events), None)

    def _note(self, result: Any, sampled: list[tuple[Tensor, int]]) -> Any:
        """A result, of whose tensors it is noted where the samples went."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors_in((result,)):
                self.layouts.put(tensor, carried("", sampled, tensor, self.samples))
        return result

    def _note_parts(self, site: Site, result: Any, sampled: list[tuple[Tensor, int]]) -> Any:
        """The same of a layer that gives states (levels, rows, features) or weights (rows, ...) beside its output."""
        output, *others = result
        self._note(output, sampled)
        axis, layout = int(isinstance(site.layer, nn.RNNBase)), sampled[0][1]
        for tensor in tensors_in(others):
            single = layout >= 0 and tensor.dim() > 2 and tensor.shape[axis] == self.samples
            self.layouts.put(tensor, axis if single else FOLDED if layout == FOLDED and axis == 0 else LOST)
        return result

    def close(self, result: Any, *, whole: bool) -> Any:
        """The result of the `whole` model, or of a part: there, what parameters alone gave may be used in any way."""
        if whole and any(map(self.derived, tensors_in((result,)))):
            result = tree_map(self.given, result)
        self.layouts, self.made = Marks(), Marks()  # the graph refers to this, and they refer to tensors
        self.routes = Routes(self.layouts, self.samples)
        return result

    def given(self, value: Any) -> Any:
        """What leaves the calls that are seen: if it has a row for each sample, these are the samples'.

        That it was made so must be known. A parameter that is as long as the batch by chance stays what it is.
        """
        if not isinstance(value, Tensor) or not torch.is_grad_enabled() or not self._by_sample(value):
            return value
        made: Made = self.made.get(value)
        if made.again is not None and not made.alike and self._again(value) is None:
            return value
        value = self._by_row(value).squeeze(1)
        self.layouts.put(value, 0)
        return value

    def _by_sample(self, tensor: Tensor) -> bool:
        """Whether it is known to be computed from parameters alone with a row for each sample."""
        made: Made | None = self.made.get(tensor)
        return made is not None and made.sure

    def _again(self, derived: Tensor) -> Tensor | None:
        """It, computed with samples, if their rows belonged to them already where it was."""
        made: Made | None = self.made.get(derived)
        again = None if made is None or made.again is None else made.again()
        fits = isinstance(again, Tensor) and again.shape == derived.shape and self.layout(again) in (0, FOLDED)
        return again if fits else None

    # What is done with a call.

    def _derive(self, name: str, tensors: list[Tensor], result: Any, again: Callable[[], Any] | None) -> Any:
        """A call with parameters and constants alone; `again` runs it as one with samples."""
        self.events += 1
        changed, first = in_place(name), tensors[0]
        origin = self.made.get(first)
        if changed and origin is not None and origin.used:
            raise self._error(f"'{name}' changes in place", [first])
        for tensor in tensors_in((first if changed else result,)):
            if not changed and any(tensor is given for given in tensors):  # as it is, by `to` or `contiguous`
                continue
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                spread = name in COPYING and (first.dim() < tensor.dim() or first.shape[0] == 1)
                alike = (name in UNCHANGED and origin is not None and origin.alike) or (
                    spread and tensor.shape[0] == self.samples
                )
                kept = again is not None and not changed and tensor.shape[:1] == (self.samples,)
                sure = kept and any(map(self._by_sample, tensors))
                self.made.put(tensor, Made(alike, None if changed else again, alike or sure))
        return result

    def _as_samples(
        self, name: str, tensors: list[Tensor], call: Callable[[Any, Any], Any], args: Any, kwargs: Any
    ) -> Callable[[], Any] | None:
        """The call with samples in place of what has a row for each, or else of constants that have as many.

        None if there are none such, or if it would draw other random numbers.
        """
        sure = any(map(self._by_sample, tensors))
        rows = [] if sure else [t for t in tensors if not self.derived(t) and rows_of(t, self.samples)]
        if _random(name) or not (rows or sure) or not (name in APART or keeps(name)):  # as cumsum(0): rows meet
            return None
        versions = list(map(_version, tensors))

        @functools.cache  # what is used twice runs once
        def run() -> Any:
            if list(map(_version, tensors)) != versions:  # changed in place since
                return None
            given = tree_map(self.given, (args, kwargs))
            for tensor in rows:
                self.layouts.put(tensor, 0 if tensor.shape[0] == self.samples else FOLDED)
            try:
                return call(*given)
            finally:
                for tensor in rows:
                    self.layouts.put(tensor, None)

        return run

    def _meet(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call in which samples meet parameters."""
        self.events += 1
        known = ruled.rule_for(name, args, kwargs)
        if known is not None and self._fits(known):
            return self._by_rule(known)
        rewritten = ruled.rewritten(name, args, self.constant)
        if rewritten is not None:
            with self:
                return rewritten(*args, **kwargs)
        call = Call.of(func, args, kwargs, self.derived, self.layout, self.samples)
        owners = self._routed(call)
        return self._one_by_one(call) if owners is None else self._by_owners(call, owners)

    def _routed(self, call: Call) -> Tensor | None:
        """The sample of each row, if it is rows that were routed that meet parameters."""
        rows = [call.leaves[i] for i, layout in call.layouts.items() if layout == LOST]
        first = next((tensor for tensor in rows if self.routes.known(tensor)), None)
        owners = None if first is None else self.routes.owner(first)
        if first is None or owners is None or not scattered.rowwise(call, owners):
            return None
        # what has no gradient, as the places where the rows of an expert end, belongs to no sample
        others = [t for i in call.layouts if differentiable(t := call.leaves[i])]
        same = all((other := self.routes.owner(t)) is not None and other.shape == owners.shape for t in others)
        single = self.routes.single(first)
        return owners if same and all(self.routes.single(t) == single for t in others) else None

    def _by_owners(self, call: Call, owners: Tensor) -> Tensor:
        for i in call.derived:
            self._use(call.leaves[i])
        result = scattered.run(call, owners, self.ledger, self.sole)
        dims = max(call.leaves[i].dim() for i in call.layouts)
        if owners.dim() == 0:
            self.routes.lies(result, LOST, single=self.routes.single(call.leaves[min(call.layouts)]))
            return result
        if result.shape[: owners.dim()] != owners.shape or (call.name != "__getitem__" and result.dim() != dims):
            self._refuse(call)  # rows were broadcast over something else
        self.routes.lies(result, LOST, owners)
        return result

    def _fits(self, known: ruled.Known) -> bool:
        layout = self.layout(known.x)
        return (
            (layout == 0 or (layout == FOLDED and known.operation.positional))
            and not self.derived(known.x)
            and self.derived(known.weight)
            and (known.bias is None or self.constant(known.bias))
        )

    def _by_rule(self, known: ruled.Known) -> Tensor:
        layout = self.layout(known.x)
        for tensor in (known.weight, known.bias):
            if tensor is not None:
                self._use(tensor)
        if layout == FOLDED:
            known = known._replace(x=known.x.unflatten(0, (self.samples, -1)))
        result = ruled.run(known, self.ledger, self.sole)
        result = result.flatten(0, 1) if layout == FOLDED else result
        self.layouts.put(result, layout)
        return result

    def _one_by_one(self, call: Call) -> Any:
        if call.in_place and 0 in call.derived:
            raise self._error(f"'{call.name}' changes in place", [call.leaves[0]])
        key = call.key()
        if key not in self.bare.plans:
            self.bare.plans[key] = make_plan(call) or self._refuse(call)
        plan = self.bare.plans[key]
        if plan.free:
            return self._note(call.run(call.leaves), [(call.leaves[i], layout) for i, layout in call.layouts.items()])
        values = list(call.leaves)
        if call.derived <= plan.by_row and not call.in_place:  # then their rows alone have to be the samples'
            for i in call.derived:
                values[i] = self._by_row(values[i]).flatten(0, 1)
            result = call.run(values)
            for tensor, layout in zip(tensors_in((result,)), plan.layouts, strict=True):
                self.layouts.put(tensor, layout)
            return result
        for i, leaf in enumerate(values):
            if i in call.derived:
                values[i] = self._by_row(leaf) if i in plan.by_row else self._copies(leaf)
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
            self.layouts.put(tensor, layout)
        return given

    def _copies(self, derived: Tensor) -> Tensor:
        self._use(derived)
        copies: Tensor = Copies.apply(derived, self.samples, self.ledger, self.sole)  # type: ignore[no-untyped-call]
        return copies

    def _by_row(self, derived: Tensor) -> Tensor:
        """(samples, rows, *rest)."""
        made = self._use(derived)
        if made is not None and made.alike:
            return self._copies(derived[:1])
        again = self._again(derived)
        if again is not None:
            rows: Tensor = again.unflatten(0, (self.samples, -1))
            return rows
        own: Tensor = Rows.apply(derived, self.samples, self.ledger, self.sole)  # type: ignore[no-untyped-call]
        return own

    def _use(self, derived: Tensor) -> "Made | None":
        made: Made | None = self.made.get(derived)
        if made is not None:
            made.used = True
        for parameter in sources(derived):
            self.uses[parameter] += 2 if self.bare.borrowed(parameter) else 1  # the layer that holds it uses it, too
        return made

    def _refuse(self, call: Call) -> Plan:
        raise self._error(f"{call.refusal()}, in a call with", [call.leaves[i] for i in call.derived])

    def _error(self, what: str, derived: Iterable[Tensor]) -> RuntimeError:
        names = {self.ledger.names.get(p, "?") for tensor in derived for p in sources(tensor)}
        return RuntimeError(
            f"no exact statistics for parameter {', '.join(map(repr, sorted(names)))} in module '{self.module}', which "
            f"got {self.samples} samples: {what} {'it' if len(names) == 1 else 'them'}. Keep the samples on the first "
            "axis, freeze the parameter, leave it to another optimizer through param_groups, or make this one with "
            'spread="passes".'
        )


def kind_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trained: tuple[bool, ...]
) -> tuple[Any, ...]:
    """What tells calls of a module apart that may use parameters in other ways: modes, flags, what is frozen."""
    return module, trained, *flags_of(module, args, kwargs)


def flags_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The modes and flags of a call. In a compiled pass they are looked at while it is traced, which they guard."""
    given = tuple([x if x is None or isinstance(x, bool | str) else type(x) for x in (*args, *kwargs.values())])
    return module.training, *kwargs, given


def _chosen(name: str, tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a tensor says, by one number, which part of a parameter is taken, as the one of an expert."""
    return name == "__getitem__" and tensor is not args[0] and tensor.dim() == 0


def _knows(site: Site) -> bool:
    """Whether a layer knows the axis of the samples by itself, as recurrent layers and attention do."""
    return getattr(site.layer, "batch_first", None) is not None


def _seen(site: Site, tensor: Tensor, samples: int) -> int:
    """Where a layer was seen to have the samples when one of them was changed."""
    single = not site.folded or tensor.shape[site.axis] == samples
    return site.axis if single else LOST if site.strided else folded(site.axis)


def _version(tensor: Tensor) -> int:
    """Tensors from inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def _random(name: str) -> bool:
    """Whether a function of that name draws other numbers when it runs again."""
    return "dropout" in name or name in RANDOM
