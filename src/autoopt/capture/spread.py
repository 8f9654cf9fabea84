"""The spread between the backward passes of one step, for parameters whose model is not known.

Each pass of an accumulated step, and each rank, gives the gradient of its own part of the batch: that part takes the
place of a sample. Where a step has one pass on one rank there is no spread, and the rules do without.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autoopt.capture.sharded import is_sharded
from autoopt.capture.source import Source
from autoopt.moments import precision, wide


class Spread(Source):
    """Observes the gradients of parameters as they arrive.

    Args:
        model: the model that owns the parameters, if it is known. Ranks are told apart only where it is a
            DistributedDataParallel.
        parameters: name -> parameter.
        elementwise: gather Σ c² for every element, or only its total.
    """

    def __init__(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter], *, elementwise: bool) -> None:
        super().__init__(model)
        self.elementwise = elementwise
        if isinstance(model, DistributedDataParallel):
            self.current.group = model.process_group
        self._parameters: dict[str, nn.Parameter] = {}
        self.squares: dict[str, Tensor] = {}
        self.passes: dict[str, int] = {}
        self._handles: list[Any] = []
        self.add(parameters)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Observe further parameters."""
        for name, parameter in parameters.items():
            if parameter.is_complex():
                raise ValueError(f"parameter '{name}' is complex, which AutoOpt does not train: leave it out.")
            if is_sharded(parameter):
                raise ValueError(
                    f"parameter '{name}' is sharded, and the gradient of one pass or rank alone is never seen: give "
                    "the model, as in AutoSGD(model), and leave spread as it is."
                )
            self._parameters[name] = parameter
            if parameter.is_floating_point():
                trains = parameter.requires_grad  # what is frozen now may be thawed, and takes no hook as it is
                self._handles.append(parameter.requires_grad_().register_hook(_hook(self, name)))
                parameter.requires_grad_(trains)

    @torch.no_grad()
    def arrived(self, name: str, gradient: Tensor) -> None:
        """The gradient of one backward pass, before it is added to those before it."""
        if self.current.resting:
            return
        before = self._parameters[name].grad
        if before is None:  # what is known is left over from a pass that no step followed
            self.squares.pop(name, None)
            self.passes.pop(name, None)
        if self._blind() or gradient.is_sparse:
            return
        if before is not None and name not in self.squares:
            self.current.leave(name, before)
        self.current.due()
        c = wide(gradient)
        square = c.square() if self.elementwise else c.flatten().dot(c.flatten())
        self.squares[name] = square if name not in self.squares else self.squares[name] + square
        self.passes[name] = self.passes.get(name, 0) + 1
        self.current.gathered = max(self.current.gathered, self.passes[name])

    def _blind(self) -> bool:
        """Whether other ranks may see other gradients: then nothing may depend on them, or the ranks drift apart."""
        return self.current.group is None and dist.is_initialized() and dist.get_world_size() > 1

    def second_moment(self, name: str) -> Tensor | None:
        """Σ c² over the passes; zero where none was seen, which is no error here."""
        if name in self.squares:
            return self.squares[name]
        parameter = self._parameters[name]
        zero = torch.zeros((), dtype=precision(parameter), device=parameter.device)
        return zero.expand(parameter.shape) if self.elementwise else zero

    def samples(self, name: str) -> int:
        """How many passes there were."""
        return self.passes.get(name, 0)

    def lost(self) -> str | None:
        """Nothing can take a parameter away."""
        return None

    def clear(self) -> None:
        super().clear()
        self.squares, self.passes = {}, {}

    def detach(self) -> None:
        super().detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _hook(spread: Spread, name: str) -> Callable[[Tensor], None]:
    """A hook that does not keep the observer alive."""
    reference = weakref.ref(spread)

    def hook(gradient: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.arrived(name, gradient)

    return hook
