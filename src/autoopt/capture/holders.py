"""Which layers use a parameter, and whether all of them can be observed."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from autoopt.capture.runners import Runner, runner_for
from autoopt.capture.site import ROLES
from autoopt.moments import Prepare, prepare_for

SITE = "_autoopt_site"


@dataclass(frozen=True)
class Holder:
    """A layer that uses a parameter."""

    path: str
    layer: nn.Module
    role: str  # the name of the layer's attribute that is the parameter, or is computed from it
    computed: bool = False


def holders_in(model: nn.Module) -> dict[nn.Parameter, list[Holder]]:
    """The layers that use each parameter of a model: those that hold it, or a tensor that is computed from it."""
    found: dict[nn.Parameter, list[Holder]] = defaultdict(list)
    within: set[nn.Module] = set()  # parametrizations: they belong to the layer whose tensor they compute
    for path, layer in model.named_modules():
        if parametrize.is_parametrized(layer):
            parametrizations: Any = layer.parametrizations
            for role, chain in parametrizations.items():
                within |= set(chain.modules())
                for parameter in chain.parameters():
                    found[parameter].append(Holder(path, layer, role, computed=True))
    for path, layer in model.named_modules():
        if layer in within:
            continue
        for key, held in layer._parameters.items():
            if held is not None:
                role = _computed(layer, key)
                found[held].append(Holder(path, layer, role or key, computed=role is not None))
    owners = {
        child: Holder(path, layer, key)
        for path, layer in model.named_modules() if runner_for(plain_class(layer)) is not None
        for key, child in layer.named_children()
    }  # fmt: skip
    return defaultdict(list, {p: [_by_owner(holder, owners) for holder in holders] for p, holders in found.items()})


def _by_owner(holder: Holder, owners: dict[nn.Module, Holder]) -> Holder:
    """A composite takes its children's parameters without calling them: it is the one that uses them."""
    owner = owners.get(holder.layer)
    return holder if owner is None else Holder(owner.path, owner.layer, f"{owner.role}.{holder.role}", holder.computed)


def _computed(layer: nn.Module, key: str) -> str | None:
    """The role of the tensor that a hook computes from this parameter before each forward pass.

    So do pruning and the older weight_norm and spectral_norm, from weight_orig, or from weight_g and weight_v.
    """
    role = key.rpartition("_")[0]
    return role if role in ROLES and isinstance(layer.__dict__.get(role), Tensor) else None


def plain_class(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer as its author made it, attached or not."""
    site = layer.__dict__.get(SITE)
    return type(layer) if site is None else site.plain


def rule_of(holder: Holder) -> Prepare | Runner | None:
    """The rule that gives the statistics of what the layer does with the parameter."""
    plain = plain_class(holder.layer)
    return runner_for(plain) or (prepare_for(plain) if holder.role in ROLES else None)


def refuse(name: str, parameter: nn.Parameter, holders: list[Holder]) -> None:
    """Raise for a trainable parameter that cannot be observed exactly, and say what to do."""
    kind = " and a ".join(dict.fromkeys(type(holder.layer).__name__ for holder in holders))
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{name}' of {kind} has no shape yet: run the model once, then make the optimizer.")
    if not parameter.requires_grad:
        return
    remedy = (
        "Freeze the parameter with requires_grad_(False), or leave it to another optimizer: "
        "param_groups=[{'params': [...]}] takes the parameters that this one shall train."
    )
    if parameter.is_complex():
        raise ValueError(f"parameter '{name}' of {kind} is complex, which AutoOpt does not train. {remedy}")
    for holder in holders:
        layer = holder.layer
        if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
            option = "sparse" if layer.sparse else "scale_grad_by_freq"
            raise ValueError(f"layer '{holder.path}' is an Embedding with {option}=True. Set {option}=False. {remedy}")
