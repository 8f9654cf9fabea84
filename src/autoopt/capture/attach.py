"""Attaching to a model: each covered layer's class is swapped for a generated subclass that runs through Observe.

A class, unlike a hook or a patched method, leaves the instance alone: hooks, parameters, buffers and state_dict stay as
they are, in-place activations keep working, and a copy or pickle of an attached layer is a plain layer again.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.capture import sharded
from autoopt.capture.attention import sequence_first
from autoopt.capture.bare import Bare
from autoopt.capture.compiled import Compiled
from autoopt.capture.composite import Composite
from autoopt.capture.distributed import any_of
from autoopt.capture.entrance import Entrance
from autoopt.capture.holders import SITE, Holder, holders_in, plain_class, refuse, rule_of
from autoopt.capture.ledger import Ledger
from autoopt.capture.observed import observe, observed
from autoopt.capture.runners import runner_for
from autoopt.capture.site import Site
from autoopt.capture.source import Source


class Capture(Source):
    """Observes parameters of a model, from now on and until `detach`.

    Args:
        model: owns the parameters; nothing in it is changed but the class of the covered layers.
        parameters: name as in `model.named_parameters()` -> parameter. Every one that trains must be covered.
        elementwise: gather Σ_i c_i² for every element (a metric weighs it later), or only its total.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, elementwise: bool) -> None:
        super().__init__(model)
        self.ledger = Ledger(self.current, total=not elementwise)
        self.sites: dict[str, Site] = {}
        self.bare = Bare(model, self.ledger, self.sites)
        self.current.entrance = Entrance(model, self.sites, self.current)
        self.current.entrance.under, self.current.entrance.watched = self.bare.run, self.bare.has_to_watch
        self._compiled = Compiled()
        self._modules: list[Any] = []  # those that fully_shard was applied to
        self._handles: list[Any] = []
        self.add(parameters)

    @property
    def exact(self) -> bool:
        """Whether every sample is looked at everywhere, or few where that costs much: see `sampled`."""
        return self.ledger.sampler.exact

    @exact.setter
    def exact(self, exact: bool) -> None:
        self.ledger.sampler.exact = exact
        for site in self.sites.values():
            site.usual = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are observed, by name."""
        return self.ledger.parameters

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Observe further parameters of the model."""
        _refuse_scripted(self.model)
        sharded.refuse(self.model, {**self.parameters, **parameters})
        sharded.reshard(self.model)
        holders = holders_in(self.model)
        for name, parameter in parameters.items():
            refuse(name, parameter, holders[parameter])
        for name, parameter in parameters.items():
            found = holders[parameter]
            self.ledger.keep(name, parameter)
            for holder in found:
                if rule_of(holder) is None:
                    self.bare.watch(holder.path)
                    continue
                site = self._site(holder)
                if holder.computed:
                    site.derive(holder.role, parameter, shared=len(found) > 1)
                else:
                    site.observe(holder.role, name, shared=len(found) > 1)
        if parameters:  # a model that is a layer itself has its site by now
            self.bare.look()
        self.current.entrance.watch()
        self._follow()

    def _follow(self) -> None:
        """See to sharded parameters, if there are any."""
        found = [p for p in self.parameters.values() if p.requires_grad and sharded.is_sharded(p)]
        self.sharded = bool(found)
        if found:
            self.current.group = sharded.group_of(found[0])
            self.current.entrance.agree = functools.partial(any_of, self.current.group, found[0].device)
            for handle in self._handles:
                handle.remove()
            self._modules = sharded.modules_of(self.model)
            self._handles = sharded.follow(self.model, self._modules, self.ledger)

    def _site(self, holder: Holder) -> Site:
        known = self.sites.get(holder.path)
        if known is not None and known.layer is not holder.layer:  # another layer was put in its place
            self.ledger.holding.pop(known, None)
            _leave(self.sites.pop(holder.path))
            self.current.entrance.forget(holder.path)
            self.current.met.discard(holder.path)
        if holder.path not in self.sites:
            layer, rule = holder.layer, rule_of(holder)
            assert rule is not None
            kind = Site if runner_for(plain_class(layer)) is None else Composite
            self.sites[holder.path] = kind(holder.path, layer, plain_class(layer), rule, self.current, self.ledger)
            if layer in sequence_first(self.model):
                self.sites[holder.path].axis = 1
            observe(self.sites[holder.path])
        return self.sites[holder.path]

    def second_moment(self, name: str) -> Tensor | None:
        """Σ_i c_i² of a parameter since the last clear, elementwise or in total; None where nothing was observed."""
        return self.ledger.squares.get(name)

    def second_moments(self, names: Sequence[str]) -> list[Tensor | None]:
        return list(map(self.ledger.squares.get, names))

    def samples(self, name: str) -> Tensor | int:
        """N behind `second_moment`: a 0-dim tensor on the device where compiled passes were counted."""
        return self.ledger.samples.get(name, 0)

    @torch.no_grad()
    def _measure(self) -> None:
        """Settle the ledger, too."""
        if not self.current.whole():
            return
        self.current.unfinished = True
        if self.sharded:
            sharded.refuse_factor(self._modules)
        elif "torch.distributed.fsdp" in sys.modules:
            sharded.refuse_late(self.model, self.parameters)
        self.ledger.settle()
        self._book_shadows(list(self.ledger.holding))
        self.ledger.besides.check(self.current.graph, self.ledger.squares, self.ledger.samples, self.parameters)
        if self.sharded:  # the gradients of accumulated passes need not be there yet: set_requires_gradient_sync(False)
            absent = [name for name, parameter in self.parameters.items() if parameter.grad is None]
            self.current.withheld |= {name for name in absent if self.second_moment(name) is not None}
        super()._measure()
        self.current.finish()

    def _book_shadows(self, sites: list[Site]) -> None:
        """Move what the shadows hold to the ledger, so that a step, which may be compiled, has no leaf to clear."""
        self.current.gathered += self._compiled.samples(sites)
        for site in sites:
            for role, shadow in site.shadows.items():
                if shadow.grad is not None:
                    self.ledger.book(site.names[role], site.counted, shadow.grad)
            site.clear()

    def lost(self) -> str | None:
        """The name of a layer that no longer reports here: another optimizer took it over, or it was detached."""
        lost = (site.name for site in self.sites.values() if site.layer.__dict__.get(SITE) is not site)
        return next(lost, self.bare.lost())

    def clear(self) -> None:
        """Forget what was gathered."""
        super().clear()
        self.ledger.clear()
        if not torch.compiler.is_compiling():  # what a pass that did not come to its end has left, and no step follows
            for site in list(self.ledger.holding):
                site.clear()

    def detach(self) -> None:
        """Give every layer that still reports here its own class back."""
        super().detach()
        self.bare.detach()
        self.current.entrance.agree = None
        for handle in self._handles:
            handle.remove()
        for site in self.sites.values():
            _leave(site)
        self.current.entrance.detach()


def _refuse_scripted(model: nn.Module) -> None:
    """No layer of a TorchScript module runs in Python."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters()):
            name = f"module '{path}'" if path else "the model"
            raise ValueError(
                f"{name} is TorchScript (torch.jit.script or trace), whose layers cannot be observed: make the "
                'optimizer with the model before it is scripted, freeze that part, or use spread="passes".'
            )


def _leave(site: Site) -> None:
    """Give a layer that still reports to this site its own class back."""
    if site.layer.__dict__.get(SITE) is site:
        if type(site.layer) is observed(site.plain):  # else another class was put on top: it runs plain now
            site.layer.__class__ = site.plain
        del site.layer.__dict__[SITE]
