"""Where a forward pass enters the model, and with what: there the layouts of the layers are probed, and N is known.

A user may call the model or only a part of it, so every module that holds an observed layer is an entrance: its class
is swapped as a layer's is, and the outermost one that is called is where the pass enters. The probe runs there if it
holds layers whose layout is not known yet, and again when a pass reaches one that the probe did not. A layer that is
called on its own has nothing to probe: the first axis is the batch. A compiled pass cannot be probed, so that the first
one of a module runs as it would without compiling, and the later ones use what it found. With fullgraph=True it cannot
do so either: unless an eager pass came before, the first axis is taken to be the batch everywhere.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves

from autoopt.capture.answer import Path
from autoopt.capture.batch import batch_size
from autoopt.capture.compiling import eagerly, may_leave, uncompiled
from autoopt.capture.current import Pass, observable
from autoopt.capture.generated import restore, stands_for, subclass
from autoopt.capture.probe import named_leaves, probe
from autoopt.capture.rerun import patient, random_numbers, same_random_numbers
from autoopt.capture.site import Site

ENTRANCE = "_autoopt_entrance"
# Wrappers: what they call is the entrance. And lists, which are never called.
PASSED = (DistributedDataParallel, DataParallel, torch._dynamo.OptimizedModule, nn.ModuleList, nn.ModuleDict)


@dataclass(eq=False)
class Door:
    """A module at which a model may be entered, as it is known to one optimizer."""

    entrance: "Entrance"
    seen: bool = False  # a pass with samples went through it, outside of compiled graphs
    axis: int | None = None  # that of the samples in its inputs, if it was probed
    shared: frozenset[Path] = frozenset()  # its inputs that all samples share
    blind: bool = False  # it could not be probed
    asked: set[str] = field(default_factory=set)  # paths of the layers that it was probed for

    def sampled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, without those that all samples share."""
        named = named_leaves(args, kwargs)
        return [leaf for path, leaf in named if isinstance(leaf, Tensor) and path not in self.shared]

    def open(self) -> bool:
        """Whether one goes through it unnoticed: inside of another call, and as others did before, unwatched."""
        return self.seen and self.entrance.entered and self.entrance.current.watch is None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module is nobody's."""


class Call(NamedTuple):
    """One of the outermost module."""

    door: Door
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    drawn: Callable[[], None] | None  # draws the random numbers again that it draws


class Entrance:
    """Watches where a model is entered, and gives its sites their layouts.

    Args:
        model: the model.
        sites: path of a layer -> its site; may grow, then `watch` again.
        current: the pass that the sites share.
    """

    def __init__(self, model: nn.Module, sites: Mapping[str, Site], current: Pass) -> None:
        self.model, self.sites, self.current = model, sites, current
        self.agree: Callable[[bool], bool] | None = None  # whether any rank says so, where ranks must run alike
        self.under: Callable[..., Any] | None = None  # what runs the forward pass of an outermost module
        self.watched: Callable[..., bool] | None = None  # whether a call of one has to run so at every pass
        self.doors: dict[nn.Module, Door] = {}
        self.known: set[str] = set()  # paths of the layers that a probe reached
        self.samples: int | None = None  # N of the forward pass that entered last
        self._over = False  # that one has ended
        self._call: Call | None = None  # the one that is under way
        self._empty = False  # that one has no samples
        self._doubt: str | None = None
        self._folds = False  # some layer is given several rows of each sample

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module is nobody's."""

    def watch(self) -> None:
        """Make entrances of all modules that hold a site. Theirs is the outermost of the classes that stand in."""
        for path in self.sites:
            for module in _around(self.model, path):
                if isinstance(module, PASSED):
                    continue
                if stands_for(type(module)) != ENTRANCE:
                    _warn_of_own_forward(self.model, module)
                    module.__class__ = _entered(type(module))
                if module not in self.doors:
                    self.doors[module] = Door(self)
                    vars(module)[ENTRANCE] = (*vars(module).get(ENTRANCE, ()), self.doors[module])
                self.doors[module].seen &= path in self.known

    def detach(self) -> None:
        """Leave the modules; those that nobody else watches get their own classes back."""
        for module in self.doors:
            others = tuple(door for door in vars(module).pop(ENTRANCE, ()) if door.entrance is not self)
            if others:
                vars(module)[ENTRANCE] = others
            restore(module)
        self.doors = {}

    def enter(self, door: Door, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A module is called. Returns whether it is the outermost: then `leave` is to follow."""
        if self._call is not None or self.current.resting or not observable():
            return False
        # a probe may be asked for on the way, and has to take the way that this pass takes
        drawn = random_numbers() if len(self.known) < len(self.sites) else None
        self._call, self._empty = Call(door, module, args, kwargs, drawn), False
        try:
            if self._asks(door, module):
                self._probe()
        except BaseException:
            self._call = None
            raise
        self.note(door, args, kwargs)
        return True

    def _asks(self, door: Door, module: nn.Module) -> bool:
        """Whether to probe it: for layers that are not known, or to know N, where some take several rows of each."""
        counts = self._folds and door.axis is None and torch._C._current_graph_task_id() == -1
        return (counts or len(self.known) < len(self.sites)) and any(
            (path not in self.known or (counts and self.sites[path].folded)) and path not in door.asked
            for path in self._within(module)
        )

    def sees(self, door: Door, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a pass of the module has to be seen, and so cannot be in a compiled graph."""
        needed = not door.seen or (self.watched is not None and self.watched(module, args, kwargs))
        return needed and observable() and not self.current.resting

    def through(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of the outermost module, watched if it has to be."""
        under = self.under
        return forward if under is None else lambda *args, **kwargs: under(module, forward, args, kwargs)

    @property
    def entered(self) -> bool:
        """Whether a pass is under way."""
        return self._call is not None

    @property
    def left(self) -> bool:
        """Whether the pass that `samples` is of has ended, and no checkpoint runs a part of it again."""
        return self._over and torch._C._current_graph_task_id() == -1

    def saw(self, door: Door) -> None:
        """A call of a module came to its end, outside of compiled graphs."""
        door.seen |= self._call is not None and not self._empty

    def leave(self, *, failed: bool) -> None:
        """The call ended."""
        assert self._call is not None
        self._over |= self._call.door.axis is not None  # else it may be a part of a pass that is compiled
        self._call = None
        doubt, self._doubt = self._doubt, None
        if doubt is not None and not failed:  # a pass that fails does so in the probe, too
            warnings.warn(doubt, stacklevel=2)

    def reach(self, site: Site) -> None:
        """A pass reaches a layer."""
        if site.name not in self.known and self._call is not None and self.agree is None:
            with ExitStack() as stack:
                if site.current.watch is not None:  # it is to see the pass itself alone
                    stack.enter_context(torch._C.DisableTorchFunction())
                self._probe()
            self.known.add(site.name)  # if only by its name, as there is nothing more to learn

    def forget(self, path: str) -> None:
        """Another layer has that path now."""
        self.known.discard(path)
        for door in self.doors.values():
            door.asked.discard(path)

    def axis(self, module: nn.Module) -> int:
        """That of the samples in the inputs of a module."""
        return self._door(module).axis or 0

    def sampled(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a module is called with, without those that all samples share."""
        return self._door(module).sampled(args, kwargs)

    def blind(self, module: nn.Module) -> bool:
        """Whether a module was to be probed, and could not be run again."""
        return self._door(module).blind

    def _door(self, module: nn.Module) -> Door:
        return self.doors.get(module) or Door(self)

    def note(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """How many samples enter, if some layer needs to know and it is here that they were found to."""
        if self._folds and door.axis is not None:
            self._over = False
            self.samples = batch_size(door.sampled(args, kwargs), door.axis)

    def entering(self, data: Tensor) -> int | None:
        """How many samples entered with the pass under way, if that is known; not where `data` is what was given."""
        if self._call is None:
            return None
        axis, leaves = self._call.door.axis, tree_leaves((self._call.args, self._call.kwargs))
        return None if axis is None or any(leaf is data for leaf in leaves) else batch_size(leaves, axis)

    def _within(self, module: nn.Module) -> Iterator[str]:
        inside = set(module.modules())
        return (path for path, site in self.sites.items() if site.layer in inside)

    def _probe(self) -> None:
        assert self._call is not None
        door, module, args, kwargs, drawn = self._call
        self._empty = batch_size(tree_leaves((args, kwargs)), 0) == 0
        if self._empty:
            if self.agree is not None:
                raise RuntimeError(
                    f"the first batch of {type(module).__name__}, which is sharded, has no samples on this rank, so "
                    "that it cannot be seen where they lie: give every rank some at the first step."
                )
            return
        layers = {path: self.sites[path].layer for path in self._within(module)}
        with patient(), uncompiled(), same_random_numbers(set()):
            if drawn is not None:
                drawn()
            found = probe(module, args, kwargs, layers, self.agree)
        door.asked |= layers.keys()
        door.axis, door.shared, self._doubt = found.axis, found.shared, found.doubt
        door.blind = not found.layouts and not found.routed and found.doubt is not None
        self.known |= found.layouts.keys() or layers.keys()  # where it cannot run, it cannot run again
        for path in sorted(found.routed):
            self.sites[path].route()
        self.known |= found.routed
        for path, layout in found.layouts.items():
            site = self.sites[path]
            if layout is not None:
                site.axis, site.fold, site.strided = layout
                site.folded, site.settled = site.fold > 1, path in found.shown
                self._folds |= site.folded


def _around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules that hold the one of that path."""
    module = model
    for name in path.split(".") if path else ():
        yield module
        module = getattr(module, name)


def _entered(plain: type[Any]) -> type[nn.Module]:
    """The subclass of a module class whose forward tells the entrances."""

    @functools.wraps(plain.forward)  # some look at the names of the arguments
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        doors: tuple[Door, ...] = self.__dict__.get(ENTRANCE, ())
        if torch.compiler.is_compiling():
            if any(door.entrance.sees(door, self, args, kwargs) for door in doors) and may_leave():
                return outside(self, *args, **kwargs)
            for door in doors:
                door.entrance.note(door, args, kwargs)  # which call is the outermost is not known there
            return plain.forward(self, *args, **kwargs)
        if all(map(Door.open, doors)):
            return plain.forward(self, *args, **kwargs)
        opened: list[Entrance] = []
        failed = True
        try:
            opened += (door.entrance for door in doors if door.entrance.enter(door, self, args, kwargs))
            watch = doors[0].entrance.current.watch if len(doors) == 1 else None
            run: Callable[..., Any] = functools.partial(plain.forward, self)
            for entrance in opened:
                run = entrance.through(self, run)
            output = run(*args, **kwargs) if watch is None else watch.part(self, run, args, kwargs)
            failed = False
            for door in doors:
                door.entrance.saw(door)
        finally:
            for entrance in opened:
                entrance.leave(failed=failed)
        return output

    outside = eagerly(forward)
    return subclass(plain, forward, ENTRANCE)


def _warn_of_own_forward(model: nn.Module, module: nn.Module) -> None:
    """A function in the place of a module's forward is called past every class that stands in for the module's."""
    if "forward" in vars(module):
        name = next((name for name, part in model.named_modules() if part is module), "") or type(module).__name__
        warnings.warn(
            f"module '{name}' has another function in the place of its forward (as Accelerate's prepare() and "
            "torch.compile(module.forward) put there), so that its inputs are not seen: the first axis of what its "
            "layers are given is taken as the batch, and a parameter that is used outside of a layer will be refused. "
            "Make the optimizer first, with the plain model.",
            stacklevel=2,
        )
