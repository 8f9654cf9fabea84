"""Subclasses that stand in for a module's class while an optimizer is attached to the module."""

import copyreg
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

KEY, ORIGIN = "_autoopt_key", "_autoopt_origin"  # of a generated class: what it was made for, the class at its root


def subclass(plain: type[Any], forward: Callable[..., Any], key: str) -> type[nn.Module]:
    """A class whose instances run `forward`, and whose copies and pickles are plain again, without the entry `key`.

    It may stand for another such class. One that was made before is found among the subclasses, which Python holds
    weakly: a cache would keep for ever a class that holds its module, as that of a parametrized layer does.
    """
    for known in type.__subclasses__(plain):
        if vars(known).get(KEY) == key:
            return known
    origin = vars(plain).get(ORIGIN, plain)

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = plain_copy(self).__reduce_ex__(protocol)
        made, args, *rest = reduced
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle asks that it make one of this class
            made, args = copyreg._reconstructor, (origin, object, None)  # type: ignore[attr-defined]
        return made, args, *rest

    def scriptable(self: nn.Module) -> nn.Module:
        copied = plain_copy(self)
        copied._modules = dict(copied._modules)  # torch.jit.script puts what its parts give in their places
        return copied

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        copied: nn.Module = plain.__deepcopy__(self, memo)
        copied.__class__ = origin
        copied.__dict__.pop(key, None)
        return copied

    # A code of its own: the compiler counts how often each is compiled, and gives up after a few times.
    code = forward.__code__.replace()
    own = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    body: dict[str, Any] = {
        "forward": functools.wraps(plain.forward)(own),
        "__reduce_ex__": reduce_ex, "__prepare_scriptable__": scriptable,
        "__module__": plain.__module__, "__doc__": plain.__doc__,
        KEY: key, ORIGIN: origin,
    }  # fmt: skip
    if hasattr(plain, "__deepcopy__"):  # that of a parametrized layer keeps the class
        body["__deepcopy__"] = deepcopy
    generated: type[nn.Module] = type(plain.__name__, (plain,), body)
    return generated


def plain_copy(module: nn.Module) -> nn.Module:
    """A module of the class that its author made, which shares all that this one holds but the optimizers' entries."""
    cls = type(module)
    keys = {vars(one).get(KEY) for one in cls.__mro__}
    copied: nn.Module = object.__new__(vars(cls)[ORIGIN])
    vars(copied).update({name: value for name, value in vars(module).items() if name not in keys})
    return copied


def stands_for(cls: type[nn.Module]) -> str | None:
    """The entry that a class was generated for; None for a class that somebody wrote."""
    return vars(cls).get(KEY)


def restore(module: nn.Module) -> None:
    """Give a module its own class back, if none of those that stand for it has an entry left."""
    if not any(vars(cls).get(KEY) in vars(module) for cls in type(module).__mro__):
        module.__class__ = vars(type(module)).get(ORIGIN, type(module))
