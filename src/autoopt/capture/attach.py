"""Attaching to a model: each covered layer's class is swapped for a generated subclass that runs through Observe.

A class, unlike a hook or a patched method, leaves the instance alone: hooks, parameters, buffers and state_dict stay as
they are, in-place activations keep working, and a copy or pickle of an attached layer is a plain layer again.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autoopt.capture.attention import sequence_first
from autoopt.capture.bare import Bare
from autoopt.capture.compiled import Compiled
from autoopt.capture.composite import Composite
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
        self.bare.axis_of = self.current.entrance.axis
        self.direct: dict[str, tuple[Site, str]] = {}  # name of a parameter with a shadow -> where it is, its role
        self._compiled = Compiled()
        self.add(parameters)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are observed, by name."""
        return self.ledger.parameters

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Observe further parameters of the model."""
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
            if len(found) == 1 and rule_of(found[0]) and found[0].role in self.sites[found[0].path].shadows:
                self.direct[name] = self.sites[found[0].path], found[0].role
        if parameters:  # a model that is a layer itself has its site by now
            self.bare.look()
        self.current.entrance.watch()

    def _site(self, holder: Holder) -> Site:
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

    def samples(self, name: str) -> Tensor | None:
        """N behind `second_moment`, a 0-dim tensor on the device."""
        return self.ledger.samples.get(name)

    @torch.no_grad()
    def _measure(self) -> None:
        """Settle the ledger, too."""
        if not self.current.whole():
            return
        self.current.unfinished = True
        self.ledger.settle()
        self.current.gathered += self._compiled.samples(self.sites.values())
        self._book_shadows()
        super()._measure()
        self.current.finish()

    def _book_shadows(self) -> None:
        """Move what the shadows hold to the ledger, so that a step, which may be compiled, has no leaf to clear."""
        for name, (site, role) in self.direct.items():
            square, count = site.shadows[role].grad, site.samples.grad
            if square is not None and count is not None:
                self.ledger.book(name, count, square)
        for site in self.sites.values():
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
            for site in self.sites.values():
                site.clear()

    def detach(self) -> None:
        """Give every layer that still reports here its own class back."""
        self.bare.detach()
        for site in self.sites.values():
            if site.layer.__dict__.get(SITE) is site:
                if type(site.layer) is observed(site.plain):  # else another class was put on top: it runs plain now
                    site.layer.__class__ = site.plain
                del site.layer.__dict__[SITE]
        self.current.entrance.detach()
