"""Attaching to a model: each covered layer's class is swapped for a generated subclass that runs through Observe.

A class, unlike a hook or a patched method, leaves the instance alone: hooks, parameters, buffers and state_dict stay as
they are, in-place activations keep working, and a copy or pickle of an attached layer is a plain layer again.
"""

import copyreg
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.capture.distributed import active_group, total
from autoopt.capture.function import Observe
from autoopt.capture.site import ROLES, Pass, Site
from autoopt.moments import COVERED, Prepare, prepare_for

SITE = "_autoopt_site"


class Capture:
    """Observes parameters of a model, from now on and until `detach`.

    Args:
        model: owns the parameters; nothing in it is changed but the class of the covered layers.
        parameters: name as in `model.named_parameters()` -> parameter. Every one that trains must be covered.
        elementwise: gather Σ_i c_i² for every element (a metric weighs it later), or only its total.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, elementwise: bool) -> None:
        self.model, self.total = model, not elementwise
        self.current = Pass(self._ended)
        self.sites: dict[str, Site] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.sizes: dict[str, Tensor] = {}  # |g| of each parameter as the last backward pass left it
        self.add(parameters)

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Observe further parameters of the model."""
        modules = dict(self.model.named_modules())
        users = defaultdict(list)  # id of a parameter -> the layers that hold it
        for path, module in modules.items():
            for parameter in module._parameters.values():
                users[id(parameter)].append(path)
        for name, parameter in parameters.items():
            _refuse(name, parameter, modules, users[id(parameter)])
        for name in parameters:
            path, _, role = name.rpartition(".")
            rule = _rule(modules[path], role)
            if rule is None:  # frozen, or it would have been refused
                continue
            site = self.sites.get(path)
            if site is None:
                plain = _plain(modules[path])
                site = Site(path, modules[path], plain, rule, total=self.total, current=self.current)
                self.sites[path] = site
                _observe(site)
            site.observe(role)
            self.parameters[name] = parameters[name]

    def second_moment(self, name: str) -> Tensor | None:
        """Σ_i c_i² of a parameter since the last clear, elementwise or in total; None where nothing was observed."""
        path, _, role = name.rpartition(".")
        shadow = self.sites[path].shadows.get(role) if path in self.sites else None
        return None if shadow is None else shadow.grad

    def samples(self, name: str) -> Tensor | None:
        """N behind `second_moment`, a 0-dim tensor on the device."""
        path = name.rpartition(".")[0]
        return self.sites[path].samples.grad if path in self.sites else None

    @property
    def ranks(self) -> int:
        """How many ranks share the batch."""
        return 1 if self.current.group is None else self.current.group.size()

    def over_ranks(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks that share the batch. Every rank must ask, in the same order."""
        return numbers if self.current.group is None else total(numbers, self.current.group)

    def _ended(self) -> None:
        """A backward pass ended. DDP averages the gradients in a callback too, which may stand behind this one."""
        torch.autograd.Variable._execution_engine.queue_callback(self._measure)

    @torch.no_grad()
    def _measure(self) -> None:
        """Note the sizes of the gradients, so that `changed` can tell what was done to them before the step."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.sizes = dict(zip(gradients, _sizes(list(gradients.values())), strict=True))
        self.current.unfinished = False

    def changed(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The factor that each gradient was multiplied by since the backward pass: clipping, a GradScaler.

        Exactly 1 for a gradient that nobody touched. None where there was no backward pass.
        """
        if not self.sizes:
            return None
        sizes = _sizes([gradient for gradient in gradients if gradient is not None])
        one = torch.ones_like(sizes[0])
        rest = iter(sizes)
        now = torch.stack([one if gradient is None else next(rest) for gradient in gradients])
        before = torch.stack([self.sizes.get(name, one) for name in names])
        return torch.where(before > 0, now / before, 1.0)

    def lost(self) -> str | None:
        """The name of a layer that no longer reports here: another optimizer took it over, or it was detached."""
        return next((site.name for site in self.sites.values() if site.layer.__dict__.get(SITE) is not site), None)

    def clear(self) -> None:
        """Forget what was gathered."""
        self.current.gathered, self.current.unfinished, self.current.blank = 0, False, False
        self.sizes = {}
        for site in self.sites.values():
            site.clear()

    def detach(self) -> None:
        """Give every layer that still reports here its own class back."""
        for site in self.sites.values():
            if site.layer.__dict__.get(SITE) is site:
                if type(site.layer) is _observed(
                    site.plain
                ):  # else another class was put on top: it runs plain from now on
                    site.layer.__class__ = site.plain
                del site.layer.__dict__[SITE]


def _sizes(gradients: list[Tensor]) -> list[Tensor]:
    """|g| of each, in one operation."""
    return list(torch._foreach_norm(gradients, dtype=torch.float64)) if gradients else []


def _observe(site: Site) -> None:
    site.layer.__class__ = _observed(site.plain)  # type: ignore[arg-type]
    site.layer.__dict__[SITE] = site


def _plain(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer as its author made it, attached or not."""
    site = layer.__dict__.get(SITE)
    return type(layer) if site is None else site.plain


def _rule(layer: nn.Module, role: str) -> Prepare | None:
    return prepare_for(_plain(layer)) if role in ROLES else None


@functools.cache
def _observed(plain: type[Any]) -> type[nn.Module]:
    """The subclass of a layer class whose forward reports to its site."""

    def forward(self: nn.Module, input: Tensor, *more: Any, **options: Any) -> Tensor:  # noqa: A002 - the layers' own name
        site: Site | None = self.__dict__.get(SITE)
        if site is not None and _observable() and site.trains() and not site.blank(input):
            if more or options:
                raise RuntimeError(
                    f"layer '{site.name}' ({plain.__name__}) was called with more than its input, for which there are "
                    "no exact statistics yet: call it with the input alone, or freeze it."
                )
            return _run(self, input)
        output: Tensor = plain.forward(self, input, *more, **options)
        return output

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super(observed, self).__reduce_ex__(protocol)
        _, _, state, *rest = reduced
        state = {key: value for key, value in state.items() if key != SITE}
        return copyreg._reconstructor, (plain, object, None), state, *rest  # type: ignore[attr-defined]

    body = {"forward": forward, "__reduce_ex__": reduce_ex, "__module__": plain.__module__, "__doc__": plain.__doc__}
    observed: type[nn.Module] = type(plain.__name__, (plain,), body)
    return observed


def _observable() -> bool:
    """Whether a forward pass is one that a backward pass into `.grad` may follow."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch.is_grad_enabled()
    return not torch._C._get_tracing_state() and torch._C._functorch.maybe_current_level() is None


def _run(layer: Any, x: Tensor) -> Tensor:
    """A layer's forward pass through Observe."""
    site: Site = layer.__dict__[SITE]
    if not torch.compiler.is_compiling():
        site.current.group = active_group() or site.current.group
    operation, batch = site.prepare(layer, x)
    weight: Tensor = layer.weight
    bias: Tensor | None = getattr(layer, "bias", None)
    if operation.lowers and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        # What autocast would do to the operation, done where autograd sees it, so that gradients come back in full.
        lower = torch.get_autocast_dtype(x.device.type)
        batch, weight, bias = batch.to(lower), weight.to(lower), None if bias is None else bias.to(lower)
    output: Tensor = Observe.apply(operation, site, batch, weight, bias, *site.leaves(batch.device))  # type: ignore[no-untyped-call]
    return output.squeeze(0) if batch.dim() > x.dim() else output


def _refuse(name: str, parameter: nn.Parameter, modules: Mapping[str, nn.Module], users: list[str]) -> None:
    """Raise for a trainable parameter that cannot be observed exactly, and say what to do."""
    path, _, role = name.rpartition(".")
    layer = modules[path]
    kind = type(layer).__name__
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{name}' of {kind} has no shape yet: run the model once, then make the optimizer.")
    if not parameter.requires_grad:
        return
    remedy = (
        f"Covered are {COVERED}. Freeze the parameter with requires_grad_(False), or leave it to another optimizer: "
        "param_groups=[{'params': [...]}] takes the parameters that this one shall train."
    )
    if type(parameter.data).__name__ == "DTensor":
        raise ValueError(
            f"parameter '{name}' of {kind} is sharded (FSDP, tensor parallel), which AutoOpt does not train yet: use "
            "DistributedDataParallel."
        )
    if parameter.is_complex():
        raise ValueError(f"parameter '{name}' of {kind} is complex, which AutoOpt does not train. {remedy}")
    if _rule(layer, role) is None:
        raise ValueError(f"no exact statistics for parameter '{name}': its layer is a {kind}. {remedy}")
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
        option = "sparse" if layer.sparse else "scale_grad_by_freq"
        raise ValueError(f"layer '{path}' is an Embedding with {option}=True. Set {option}=False. {remedy}")
    if len(users) > 1:
        raise ValueError(
            f"parameter '{name}' is shared by the layers {', '.join(map(repr, users))}: what a sample contributes "
            f"would have to be summed over them, which AutoOpt does not do yet. Untie the layers. {remedy}"
        )
