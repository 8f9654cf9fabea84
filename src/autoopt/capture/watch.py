"""Looks at every torch function of a forward pass, and runs those in which samples meet parameters sample by sample.

It follows which tensors were computed from parameters alone and which hold samples, and where (`layout`). Where the two
meet (`meeting`), the call goes to a rule (`ruled`) or runs with a copy of the parameter for each sample (`rowwise`), so
that the gradients of the copies are the contributions c_i. Everything else runs as it is. The parameters stay in their
places and no tensor changes its type, so nothing can leak into the model.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map

from autoopt.capture import computed, meeting
from autoopt.capture.compiling import compiled
from autoopt.capture.kinds import kind_of
from autoopt.capture.layout import LOST, carried, follow, of_one
from autoopt.capture.ledger import sources
from autoopt.capture.marks import Layouts, Marks, tensors_in
from autoopt.capture.routes import INTO, Routes

if TYPE_CHECKING:
    from autoopt.capture.bare import Bare

ASKING = {"__get__", "dim", "size", "__len__", "numel", "is_floating_point", "is_contiguous", "stride", "__bool__"}
METADATA = {"view_as", "reshape_as", "expand_as", "type_as", "to", "zeros_like", "ones_like", "empty_like"}


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
        self.layouts = Layouts(self.samples)
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
                return meeting.meet(self, func, name, args, kwargs)
            call = functools.partial(self.__torch_function__, computed.of_any_strides(func, args), types)
            again = computed.as_samples(self, name, tensors, call, args, kwargs)
            return computed.derive(self, name, tensors, func(*args, **kwargs), again)
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
            if LOST in layouts and self.samples > 1:
                self.routes.follow(name, args, kwargs, [tensor for tensor, _ in sampled], found, blank=blank)
            for tensor, layout in zip(found, layouts, strict=True):
                self.layouts.put(tensor, layout)
        return result

    # What is known of a tensor.

    def derived(self, tensor: Tensor) -> bool:
        """Whether it was computed from observed parameters alone, and leads to them."""
        if tensor in self.ledger.names:
            return tensor.requires_grad
        if self.made.get(tensor) is None and self._of_parameters(tensor):
            self.made.put(tensor, computed.Made(alike=False, versions=(0, tensor._version)))
        return self.made.get(tensor) is not None

    def _of_parameters(self, tensor: Tensor) -> bool:
        """Whether an autograd.Function, which is not seen to run, was given parameters and no other tensor."""
        node = tensor.grad_fn
        if not isinstance(node, BackwardCFunction) or self.layouts.get(tensor) is not None:
            return False
        given = [getattr(before, "variable", None) for before, _ in node.next_functions]  # None: it needs no gradient
        return len(given) > 0 and all(one in self.ledger.names for one in given)

    def layout(self, tensor: Tensor) -> int | None:
        """Where the samples are; None for what holds none."""
        known: int | None = self.layouts.get(tensor)
        if known is None and tensor.grad_fn is not None and not self.derived(tensor):
            # From a function that nobody saw, as autograd.Function.apply: constants have no graph.
            known = 0 if tensor.dim() and tensor.shape[0] == self.samples else LOST
            known = of_one(tensor, known) if self.samples == 1 else known
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

    # What modules, and the caller of the outermost one, see.

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
        key = *kind_of(module, args, kwargs, self.trained), self.samples == 1
        on_top = _get_current_function_mode() is self  # else a mode of the user's is, which is to see what it sees
        quiet = self.bare.quiet(key) and self.bare.complete(module, self.trained)
        if quiet and on_top and not self.ledger.sampler.exact:
            self.ledger.current.watch = None
            try:
                with _pop_mode_temporarily(), compiled():
                    result = run(*args, **kwargs)
            finally:
                self.ledger.current.watch = self
            return self.note(result, sampled)
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

    def note(self, result: Any, sampled: list[tuple[Tensor, int]]) -> Any:
        """A result, of whose tensors it is noted where the samples went."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors_in((result,)):
                self.layouts.put(tensor, carried("", sampled, tensor, self.samples))
        return result

    def close(self, result: Any, *, whole: bool) -> Any:
        """The result of the `whole` model, or of a part: there, what parameters alone gave may be used in any way."""
        if whole and any(map(self.derived, tensors_in((result,)))):
            result = tree_map(functools.partial(computed.given, self), result)
        self.layouts, self.made = Layouts(self.samples), Marks()  # the graph refers to this, and they refer to tensors
        self.routes = Routes(self.layouts, self.samples)
        return result

    def error(self, what: str, derived: Iterable[Tensor]) -> RuntimeError:
        """What to raise where a call mixes samples, or may."""
        names = {self.ledger.names.get(p, "?") for tensor in derived for p in sources(tensor)}
        return RuntimeError(
            f"no exact statistics for parameter {', '.join(map(repr, sorted(names)))} in module '{self.module}', which "
            f"got {self.samples} samples: {what} {'it' if len(names) == 1 else 'them'}. Keep the samples on the first "
            "axis, freeze the parameter, leave it to another optimizer through param_groups, or make this one with "
            'spread="passes".'
        )


def _chosen(name: str, tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a tensor says, by one number, which part of a parameter is taken, as the one of an expert."""
    return name == "__getitem__" and tensor is not args[0] and tensor.dim() == 0
