"""Kinds of calls of a module, which may use parameters in other ways."""

from typing import Any

from torch import nn


def kind_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trained: tuple[bool, ...]
) -> tuple[Any, ...]:
    """What tells them apart: modes, flags, what is frozen."""
    return module, trained, *flags_of(module, args, kwargs)


def flags_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The modes and flags of a call. In a compiled pass they are looked at while it is traced, which they guard."""
    given = tuple([x if x is None or isinstance(x, bool | str) else type(x) for x in (*args, *kwargs.values())])
    return module.training, *kwargs, given
