"""The classes of layers while they are observed, and their forward pass."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from autoopt.capture import glance, layers
from autoopt.capture.composite import Composite
from autoopt.capture.current import observable, operands
from autoopt.capture.distributed import active_group
from autoopt.capture.function import Observe
from autoopt.capture.generated import subclass
from autoopt.capture.holders import SITE
from autoopt.capture.runners import run, runner_for
from autoopt.capture.site import Site


def observe(site: Site) -> None:
    """Have a layer report to its site from now on."""
    site.layer.__class__ = observed(site.plain)
    site.layer.__dict__[SITE] = site


def observed(plain: type[Any]) -> type[nn.Module]:
    """The subclass of a layer class whose forward reports to its site."""

    def forward(self: nn.Module, input: Tensor, *more: Any, **options: Any) -> Any:  # noqa: A002 - the layers' own name
        site: Site | None = self.__dict__.get(SITE)
        if site is not None and not (more or options) and (some := glance.as_usual(site, input)) is not None:
            site.current.group = active_group() or site.current.group
            operation, batch = site.prepare(self, input)
            return glance.run(site, operation, input, batch, some, usual=True)
        if site is None or site.current.resting or not observable() or not site.trains():
            return plain.forward(self, input, *more, **options)
        watch = site.current.watch
        if not (site.routed or (watch is not None and watch.routes.known(input))) and site.blank(input):
            return plain.forward(self, input, *more, **options)
        if more or options:
            raise RuntimeError(
                f"layer '{site.name}' ({plain.__name__}) was called with more than its input, for which there are no "
                "exact statistics yet: call it with the input alone, or freeze it."
            )
        site.reached()
        site.takes(input)
        if watch is not None:
            return layers.run(watch, site, functools.partial(_run, self), input)
        if site.routed:
            raise site.unknown(input)
        return _run_eagerly(self, input) if torch.compiler.is_compiling() and site.eager else _run(self, input)

    def forward_composite(self: nn.Module, *args: Any, **options: Any) -> Any:
        site: Composite | None = self.__dict__.get(SITE)
        if site is None or site.current.resting or not observable() or not site.trains():
            return plain.forward(self, *args, **options)
        site.reached()
        site.takes(args[0] if args else options.get("input"))
        if site.current.watch is not None:
            return layers.run(site.current.watch, site, functools.partial(run, site), *args, **options)
        return run(site, *args, **options)

    return subclass(plain, forward if runner_for(plain) is None else forward_composite, SITE)


def _run(layer: Any, x: Tensor) -> Tensor:
    """A layer's forward pass through Observe, or with a glance at it."""
    site: Site = layer.__dict__[SITE]
    if not torch.compiler.is_compiling():
        site.current.group = active_group() or site.current.group
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"the input of layer '{site.name}' carries a tangent of forward-mode differentiation, by which its "
                "parameters are used once more than is seen. Leave them to another optimizer through param_groups, or "
                'make this one with spread="passes".'
            )
    if x.is_nested:
        raise RuntimeError(
            f"layer '{site.name}' got a nested tensor, in which it is not seen what one sample adds: pad it "
            '(x.to_padded_tensor(0.0)), or make the optimizer with spread="passes".'
        )
    if site.axis and x.dim() == 2 and isinstance(layer, nn.Linear | nn.LayerNorm | nn.RMSNorm):
        raise RuntimeError(
            f"layer '{site.name}' got an input of shape {tuple(x.shape)} where it takes (time, batch, features): give "
            "the model a batch, of one sample if need be."
        )
    operation, batch = site.prepare(layer, site.grouped(x))
    some = glance.suits(site, operation, x, batch)
    if some is not None:
        return glance.run(site, operation, x, batch, some, usual=False)
    single = batch.dim() > x.dim()
    windows = site.fold > 1 and operation.positional
    if site.fold > 1:
        site.check_fold(batch.shape[0])
    if windows:  # what would be summed over the rows of a sample, the operation sums over its positions
        batch = batch.unflatten(0, (-1, site.fold))
    weight: Tensor = layer.weight
    bias: Tensor | None = getattr(layer, "bias", None)
    if not site.origins and not torch.compiler.is_compiling():
        site.refuse_others()
    derived = {"weight": weight, "bias": bias} if site.origins else None
    if operation.lowers:
        # What autocast would do to the operation, done where autograd sees it, so that gradients come back in full.
        batch, weight, bias = operands(batch, weight, bias)
    leaves = site.leaves(batch.device)
    output: Tensor = Observe.apply(operation, site, derived, batch, weight, bias, *leaves)  # type: ignore[no-untyped-call]
    if single:
        return output.squeeze(0)
    output = output.flatten(0, 1) if windows else output
    return site.ungrouped(output)


_run_eagerly = torch._dynamo.disable(_run)
