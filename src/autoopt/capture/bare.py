"""Parameters that no layer rule covers: class tokens, position embeddings, layer scales, a user's own F.linear.

The modules that hold them, and the model itself, run under a `Watch`. Their classes are swapped as those of the covered
layers are. Of a model without such parameters every kind of pass is watched once, at the outermost module that is
called, to see whether its layers have to be (a layer that sees the same for all samples, as position embeddings do; a
parameter that is used outside of its layer; samples that are not on the first axis). Of a model that has to be watched
this is the whole model at first, then the one part of it, if there is one, in which all of that was seen: of a vision
transformer its embeddings, though not where all samples are asked for. A compiled model runs that part between its
graphs, so that the head and the loss of a language model are compiled, though its position embeddings are watched.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autoopt.capture.batch import batch_size
from autoopt.capture.compiling import eagerly, uncompiled
from autoopt.capture.current import observable
from autoopt.capture.distributed import active_group
from autoopt.capture.entrance import Entrance
from autoopt.capture.generated import restore, stands_for, subclass
from autoopt.capture.kinds import flags_of, kind_of
from autoopt.capture.ledger import Ledger
from autoopt.capture.rowwise import Plan
from autoopt.capture.site import Site
from autoopt.capture.watch import Watch

WATCHED = "_autoopt_watched"
KINDS = 1024  # of passes to remember
PATIENCE = 100  # passes in which to wait for layers that are left out so far
WRAPPERS = (DistributedDataParallel, DataParallel, torch._dynamo.OptimizedModule)


class Seat(NamedTuple):
    """What a watched module knows of one optimizer. Of its own, so that modules that are alike share a graph."""

    bare: "Bare"
    holds: bool  # a parameter without a rule

    def watches(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the module cannot be in a compiled graph."""
        if self.holds or not self.bare.everywhere or (self.bare.holding and not self.bare.needed):
            return self.holds
        focus = self.bare.focus
        if module is not self.bare.root:
            return focus is not None and focus.module is module
        return focus is None or focus.flags != flags_of(module, args, kwargs)


class Focus(NamedTuple):
    """The part of a model in which all is that has to be watched, as it was seen."""

    module: nn.Module
    flags: tuple[Any, ...]  # of the call of the model
    trained: tuple[bool, ...]


class Bare:
    """The modules of a model that are watched for one optimizer.

    Args:
        model: the model that is trained.
        ledger: is told of what is seen, for the parameters that it has an account for.
        sites: the layers that have rules.
    """

    def __init__(self, model: nn.Module, ledger: Ledger, sites: Mapping[str, Site]) -> None:
        self.model, self.ledger, self.sites = model, ledger, sites
        self.root = model
        while isinstance(self.root, WRAPPERS):
            self.root = next(self.root.children())
        self.names: dict[nn.Module, str] = {}  # of the watched modules
        self.holding: set[nn.Module] = set()  # those of them that hold parameters without a rule
        self.everywhere = False  # the whole model has to be watched
        self.focus: Focus | None = None  # and of it this part alone
        self.needed = False  # layers with rules are among what has to be watched
        self._patience = PATIENCE  # watched passes that are left for layers that were not seen yet
        self._unseen: tuple[Any, set[nn.Module]] = None, set()  # these layers, and what they go by
        self._whole: set[tuple[Any, ...]] = set()  # flags of calls of which no one part holds all of that
        self._looked: dict[Any, bool] = {}  # kinds of passes that were watched: whether with several samples
        self._quiet: dict[Any, bool] = {}  # kinds of calls of parts: whether only layers with rules ever met parameters
        self.plans: dict[Any, Plan] = {}  # how each kind of call was found to run
        self.placed: set[Site] = set()  # layers that were told where their samples are
        self._holders: dict[str, Site] = {}  # name of a parameter -> a layer that has it
        self._opened: dict[int, int] = {}  # backward passes before -> forward passes since

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module is nobody's."""

    def watch(self, path: str) -> None:
        """Watch the module of that name, which holds a parameter without a rule, wherever it is used."""
        module = self.model.get_submodule(path)
        while type(module).forward is nn.Module.forward:  # a ParameterList: its parent uses what it holds
            if not path:
                break
            path = path.rpartition(".")[0]
            module = self.model.get_submodule(path)
        self.holding.add(module)
        self.everywhere = True
        self._swap(module, path)

    def holds(self, module: nn.Module) -> bool:
        """Whether parameters without a rule are held by the module or by a part of it."""
        return any(part in self.holding for part in module.modules())

    def look(self) -> None:
        """Watch the whole model, at least once."""
        self._holders = {name: site for site in self.sites.values() for name in site.names.values()}
        self._swap(self.root, type(self.root).__name__)

    def _swap(self, module: nn.Module, name: str) -> None:
        if any(site.layer is module for site in self.sites.values()):
            return
        if module not in self.names:
            self.names[module] = name
            if all(stands_for(cls) != WATCHED for cls in type(module).__mro__):
                module.__class__ = _watched(type(module))
            vars(module)[WATCHED] = (*vars(module).get(WATCHED, ()), Seat(self, False))
        if module in self.holding:
            vars(module)[WATCHED] = tuple(Seat(b, h or b is self) for b, h in vars(module)[WATCHED])

    def borrowed(self, parameter: nn.Parameter) -> bool:
        """Samples met this parameter outside of its layer: if it has one, it has to expect other uses."""
        site = self._holders.get(self.ledger.names.get(parameter, ""))
        if site is not None:
            site.repeated = True
        return site is not None

    def has_to_watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the module cannot be in a compiled graph."""
        seats = vars(module).get(WATCHED, ())
        return any(seat.bare is self and seat.watches(module, args, kwargs) for seat in seats)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pass of a watched module."""
        current = self.ledger.current
        if current.watch is not None:
            return forward(*args, **kwargs)
        trained = self.trained()
        kind = kind_of(module, args, kwargs, trained)
        if self.focus is not None and self.focus.trained != trained:
            self.focus = None  # what is thawed may be used anywhere
        settled = not self.everywhere or self._focused(module, args, kwargs)
        complete = self.complete(module, trained)
        entrance: Entrance = self.ledger.current.entrance
        if settled and complete and kind in self._looked:
            tensors = () if self._looked[kind] else entrance.sampled(module, args, kwargs)
            if self._looked[kind] or batch_size(tensors, entrance.axis(module)) == 1:  # one says nothing of several
                return forward(*args, **kwargs)
        self._patience -= not complete
        if not self.holding and entrance.blind(module):  # the first axis is the batch in all layers, as it was warned
            return forward(*args, **kwargs)
        tensors = entrance.sampled(module, args, kwargs)
        name = self.names.get(module) or type(module).__name__
        watch = Watch(self, tensors, name, entrance.axis(module))
        if watch.samples == 0:
            if any(tensor.numel() == 0 for tensor in tensors):
                current.empty()
            return forward(*args, **kwargs)
        current.group = active_group() or current.group
        current.watch = watch
        try:
            with uncompiled(), watch:
                result = forward(*args, **kwargs)
        finally:
            current.watch = None
        if len(self._looked) >= KINDS:  # a model that is called with other words every time
            self._looked.clear()
        self._looked[kind] = self._looked.get(kind, False) or watch.samples > 1
        self.needed |= watch.needed
        self.everywhere |= watch.needed or bool(watch.uses)
        if module is self.root and self.everywhere:
            self._focus(watch, flags_of(module, args, kwargs))
        return watch.close(result, whole=module is self.root)

    def _focused(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether of a call of the model that part is to be watched alone, in eager passes too."""
        focus = self.focus
        if module is not self.root or focus is None or self.ledger.sampler.exact:
            return False
        return focus.flags == flags_of(module, args, kwargs)

    def _focus(self, watch: Watch, flags: tuple[Any, ...]) -> None:
        """Remember in which part all was that has to be watched. Other flags are watched in the whole model."""
        part, known = watch.around(), self.focus
        if not watch.events or flags in self._whole or (known is not None and known.flags != flags):
            return
        if len(self._whole) >= KINDS:
            return
        if known is not None and part is not None and part in known.module.modules():
            return  # this pass needed less
        more = known is None or (part is not None and known.module in part.modules())
        # what others hold than a part may be used by others
        if part is None or not more or not self._held() <= set(part.modules()):
            self._whole.add(flags)
            self.focus = None
            return
        self.focus = Focus(part, flags, watch.trained)
        if part not in self.names:
            self._swap(part, next(name for name, module in self.root.named_modules() if module is part))

    def _held(self) -> set[nn.Module]:
        """Those that hold parameters without a rule, and are not replaced by now."""
        return self.holding.intersection(self.root.modules())

    def quiet(self, kind: Any) -> bool:
        """Whether nothing has to be seen in calls of a part that are of this kind."""
        return self._quiet.get(kind, False)

    def heard(self, kind: Any, *, quiet: bool) -> None:
        """One was watched. What was not quiet once never is again; of too many kinds those that are new are watched."""
        if kind in self._quiet or len(self._quiet) < KINDS:
            self._quiet[kind] = quiet and self._quiet.get(kind, True)

    def complete(self, module: nn.Module, trained: tuple[bool, ...]) -> bool:
        """Whether all layers in a module that train were seen: of another one nobody knows what it will be given.

        One that was not in a hundred passes, as an unused head, is taken never to be.
        """
        met = self.ledger.current.met
        known = trained, len(met), len(self.sites)
        if known != self._unseen[0]:  # seldom, while every watched module asks
            left = {site.layer for name, site in self.sites.items() if name not in met and site.trains()}
            self._unseen = known, left
        unseen = self._unseen[1]
        return not unseen or self._patience <= 0 or unseen.isdisjoint(module.modules())

    def trained(self) -> tuple[bool, ...]:
        """Which of the parameters are not frozen."""
        return tuple([parameter.requires_grad for parameter in self.ledger.parameters.values()])

    def alone(self) -> Callable[[], bool]:
        """Whether the forward pass that begins is the only one before the next backward pass; asked in that one."""
        count = self.ledger.current.count
        again = torch._C._current_graph_task_id() != -1  # a checkpoint runs a part again, and maybe others too
        self._opened = {count: self._opened.get(count, 0) + 1}
        return lambda: not again and self._opened.get(count) == 1

    def lost(self) -> str | None:
        """The name of a module that no longer reports here: it was detached, or another optimizer took it over."""
        for module in self.holding:
            others = [seat.bare for seat in vars(module).get(WATCHED, ())]
            later = others[others.index(self) + 1 :] if self in others else [self]
            if any(other.ledger.names.keys() & self.ledger.names.keys() for other in later):
                return self.names[module]
        return None

    def detach(self) -> None:
        """Leave the modules; those that nobody else watches get their own classes back."""
        self._looked.clear()
        self._quiet.clear()
        for module in self.names:
            others = tuple(seat for seat in vars(module).pop(WATCHED, ()) if seat.bare is not self)
            if others:
                vars(module)[WATCHED] = others
            restore(module)


def _watched(plain: type[Any]) -> type[nn.Module]:
    """The subclass of a module class whose forward runs under the Watch of each optimizer."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seats: tuple[Seat, ...] = self.__dict__.get(WATCHED, ()) if observable() else ()
        inside = torch.compiler.is_compiling()
        if inside:
            seats = tuple([seat for seat in seats if seat.watches(self, args, kwargs)])
        bares = tuple(seat.bare for seat in seats if not seat.bare.ledger.current.resting)
        return outside(bares, self, args, kwargs) if bares and inside else run(bares, self, args, kwargs)

    def run(bares: tuple[Bare, ...], self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The latest looks first."""
        if not bares:
            return plain.forward(self, *args, **kwargs)
        first, *rest = bares
        return first.run(self, lambda *a, **k: run(tuple(rest), self, a, k), args, kwargs)

    outside = eagerly(run)
    return subclass(plain, forward, WATCHED)
