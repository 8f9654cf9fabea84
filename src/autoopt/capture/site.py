"""One observed layer: its shadow leaves, and the checks that keep what they hold exact."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.moments import Prepare

ROLES = ("weight", "bias")


@dataclass
class Pass:
    """What is known of the backward pass that is under way, shared by all sites of an optimizer.

    Wrong statistics would train badly without a word, so what this version cannot do exactly is refused.
    """

    graph: int = -1
    samples: int = 0
    first: str = ""
    seen: set[str] = field(default_factory=set)
    largest: int = 0  # the largest batch since the optimizer was made

    def enter(self, name: str, samples: int) -> None:
        """A layer's backward begins, with so many samples."""
        graph = torch._C._current_graph_task_id()
        if graph != self.graph:
            self.graph, self.samples, self.first, self.seen = graph, samples, name, set()
            self.largest = max(self.largest, samples)
        if samples != self.samples:
            raise RuntimeError(
                f"layer '{name}' got {samples} rows where '{self.first}' got {self.samples} in the same backward pass, "
                "so it is not clear which rows belong to one sample. The first axis of every layer's input must be the "
                "batch: reshape (batch · time, features) to (batch, time, features) before the layer."
            )
        if name in self.seen:
            raise RuntimeError(
                f"layer '{name}' was used more than once in one forward pass. What a sample contributes would have to "
                "be summed over the uses before it is squared, which AutoOpt does not do yet: give each use a layer of "
                "its own, or leave this layer to another optimizer through param_groups."
            )
        self.seen.add(name)


class Site:
    """The shadow leaves of one layer's parameters; see Note [shadow leaves]."""

    def __init__(
        self, name: str, layer: nn.Module, prepare: Prepare, roles: list[str], *, total: bool, current: Pass
    ) -> None:
        self.name, self.layer, self.total = name, layer, total
        self.prepare = prepare
        self.roles = roles  # which of ROLES are observed
        self.current = current
        self.shadows: dict[str, Tensor] = {}  # role -> leaf whose .grad is Σ_i c_i²
        self.samples: Tensor | None = None  # leaf whose .grad is N

    def parameter(self, role: str) -> nn.Parameter:
        parameter = getattr(self.layer, role)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def leaves(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The leaves to run forward with: samples, weight, bias. A shadow is there only where the parameter trains."""
        device = x.device
        if self.samples is None or self.samples.device != device:
            self.samples = torch.zeros((), device=device).requires_grad_()
        return self.samples, self._shadow("weight", device), self._shadow("bias", device)

    def _shadow(self, role: str, device: torch.device) -> Tensor | None:
        if role not in self.roles or not (parameter := self.parameter(role)).requires_grad:
            return None
        shadow = self.shadows.get(role)
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        if shadow is None or shadow.device != device or shadow.dtype != dtype:
            shape = () if self.total else parameter.shape
            shadow = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()  # no memory of its own
            self.shadows[role] = shadow
        return shadow

    def check(self, samples: int, ctx: Any) -> None:
        """Before the moments of a backward pass: is what they would be added to, and what they are, what it seems?"""
        if ctx.spent:
            raise RuntimeError(
                f"backward ran twice through the same forward pass of layer '{self.name}' (retain_graph=True), which "
                "would count every sample twice: add the losses up and call backward() once."
            )
        ctx.spent = True
        self.current.enter(self.name, samples)
        if all(self.parameter(role).grad is None for role in self.roles):
            self.clear()  # left over from a backward pass that no step followed

    def clear(self) -> None:
        """Forget the statistics gathered so far."""
        for leaf in (self.samples, *self.shadows.values()):
            if leaf is not None:
                leaf.grad = None
