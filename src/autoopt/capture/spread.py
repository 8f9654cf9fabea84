"""The spread between the backward passes of one step, for parameters whose model is not known.

Each pass of an accumulated step, and each rank, gives the gradient of its own part of the batch: that part takes the
place of a sample. Where a step has one pass on one rank there is no spread, and the rules do without.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autoopt.capture.current import Pass
from autoopt.capture.distributed import total


class Spread:
    """Observes the gradients of parameters as they arrive; the same questions can be asked of it as of a Capture.

    Args:
        model: the model that owns the parameters, if it is known. Ranks are told apart only where it is a
            DistributedDataParallel.
        parameters: name -> parameter.
        elementwise: gather Σ c² for every element, or only its total.
    """

    def __init__(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter], *, elementwise: bool) -> None:
        self.model, self.elementwise = model, elementwise
        self.current = Pass(lambda: None)
        if isinstance(model, DistributedDataParallel):
            self.current.group = model.process_group
        self.parameters: dict[str, nn.Parameter] = {}
        self.squares: dict[str, Tensor] = {}
        self.passes: dict[str, int] = {}
        self.sizes: dict[str, Tensor] = {}  # |g| as the last backward pass left it
        self.counts: dict[tuple[int, torch.device], Tensor] = {}
        self._handles: list[Any] = []
        self.add(parameters)

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Observe further parameters."""
        for name, parameter in parameters.items():
            if parameter.is_complex():
                raise ValueError(f"parameter '{name}' is complex, which AutoOpt does not train: leave it out.")
            self.parameters[name] = parameter
            if parameter.requires_grad:
                self._handles += [
                    parameter.register_hook(_call(self, "_arrived", name)),
                    parameter.register_post_accumulate_grad_hook(_call(self, "_accumulated", name)),
                ]

    @torch.no_grad()
    def _arrived(self, name: str, gradient: Tensor) -> None:
        """The gradient of one backward pass, before it is added to those before it."""
        if self.parameters[name].grad is None:
            self._forget(name)  # left over from a pass that no step followed
        if self._blind() or gradient.is_sparse:
            return
        c = gradient if gradient.dtype == torch.float64 else gradient.float()
        square = c.square() if self.elementwise else c.flatten().dot(c.flatten())
        self.squares[name] = square if name not in self.squares else self.squares[name] + square
        self.passes[name] = self.passes.get(name, 0) + 1
        self.current.gathered = max(self.current.gathered, self.passes[name])

    @torch.no_grad()
    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if name in self.squares:
            assert parameter.grad is not None
            self.sizes[name] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)

    def _blind(self) -> bool:
        """Whether other ranks may see other gradients: then nothing may depend on them, or the ranks drift apart."""
        return self.current.group is None and dist.is_initialized() and dist.get_world_size() > 1

    def second_moment(self, name: str) -> Tensor | None:
        """Σ c² over the passes since the last clear; zero where none was seen."""
        parameter = self.parameters[name]
        if name in self.squares:
            return self.squares[name]
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        zero = torch.zeros((), dtype=wide, device=parameter.device)
        return zero.expand(parameter.shape) if self.elementwise else zero

    def samples(self, name: str) -> Tensor | None:
        """How many passes there were, a 0-dim tensor on the device."""
        key = self.passes.get(name, 0), self.parameters[name].device
        if key not in self.counts:  # few occur, so each is made once
            self.counts[key] = torch.tensor(float(key[0])).to(key[1])
        return self.counts[key]

    @property
    def ranks(self) -> int:
        """How many ranks share the batch."""
        return 1 if self.current.group is None else self.current.group.size()

    def over_ranks(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks that share the batch. Every rank must ask, in the same order."""
        return numbers if self.current.group is None else total(numbers, self.current.group)

    def changed(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The factor that each gradient was multiplied by since the backward pass: clipping, a GradScaler."""
        if not self.sizes or self.ranks > 1:  # DDP averages after this: its factor is not the user's
            return None
        one = torch.ones((), dtype=torch.float64, device=next(iter(self.sizes.values())).device)
        now = [one if g is None else torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        factors = [
            size / self.sizes[name] if name in self.sizes else one for name, size in zip(names, now, strict=True)
        ]
        return torch.stack([torch.where(factor.isfinite(), factor, 1.0) for factor in factors])

    def lost(self) -> str | None:
        """Nothing can take a parameter away."""
        return None

    def clear(self) -> None:
        """Forget what was gathered."""
        self.squares, self.passes, self.sizes = {}, {}, {}
        self.current.gathered = 0

    def _forget(self, name: str) -> None:
        for known in (self.squares, self.passes, self.sizes):
            known.pop(name, None)

    def detach(self) -> None:
        """Observe no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _call(spread: Spread, method: str, name: str) -> Any:
    """A hook that does not keep the observer alive."""
    reference = weakref.ref(spread)

    def hook(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            getattr(alive, method)(name, tensor)

    return hook
