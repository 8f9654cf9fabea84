"""One observed layer: its shadow leaves, and the checks that keep what they hold exact."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoopt.moments import Prepare

ROLES = ("weight", "bias")


@dataclass
class Pass:
    """What is known of the backward pass that is under way, shared by all sites of an optimizer.

    Wrong statistics would train badly without a word, so what this version cannot do exactly is refused.
    """

    ended: Callable[[], None]  # called at the end of each backward pass
    graph: int = -1  # autograd's number for it
    queued: int = -1  # the pass at whose end `ended` is already due
    unfinished: bool = False  # it began and has not ended: an error on the way
    blank: bool = False  # an empty batch passed, whose gradients of zero come without statistics
    samples: int = 0
    first: str = ""
    seen: set[str] = field(default_factory=set)
    gathered: int = 0  # samples of all passes since the statistics were cleared
    group: "dist.ProcessGroup | None" = None  # the ranks that share the batch

    def arrived(self, leaf: Tensor) -> None:
        """A layer's statistics were accumulated; also in a compiled backward pass, which does not call `enter`."""
        graph = torch._C._current_graph_task_id()
        if graph != self.queued:
            self.queued = graph
            torch.autograd.Variable._execution_engine.queue_callback(self.ended)

    def enter(self, name: str, samples: int, graph: int) -> None:
        """A layer's backward begins, with so many samples."""
        self.unfinished = True
        if graph != self.graph:
            self.graph, self.samples, self.first, self.seen = graph, samples, name, set()
            self.gathered += samples
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
        self, name: str, layer: nn.Module, plain: type[nn.Module], prepare: Prepare, *, total: bool, current: Pass
    ) -> None:
        self.name, self.layer, self.prepare = name, layer, prepare
        self.plain = plain  # the layer's own class
        self.total = total  # only the total of Σ_i c_i² is asked for
        self.current = current
        self.shadows: dict[str, Tensor] = {}  # role -> leaf whose .grad is Σ_i c_i²
        self.samples = torch.zeros(())  # leaf whose .grad is N

    def parameter(self, role: str) -> nn.Parameter:
        parameter = getattr(self.layer, role)
        if not isinstance(parameter, nn.Parameter):
            raise RuntimeError(
                f"'{role}' of layer '{self.name}' is no parameter any more (a parametrization, pruning): call the "
                "optimizer's detach() before such a change, and make it anew after."
            )
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a layer is nobody's."""

    def observe(self, role: str) -> None:
        """Put a shadow beside the parameter of that role, where the parameter now is."""
        parameter = self.parameter(role)
        leaf = torch.zeros((), dtype=_precision(parameter), device=parameter.device)
        self.shadows[role] = leaf.expand(() if self.total else parameter.shape).requires_grad_()  # one number of memory
        self.samples = torch.zeros((), device=parameter.device).requires_grad_()
        self.samples.register_post_accumulate_grad_hook(self.current.arrived)

    def leaves(self, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The leaves to run forward with: samples, weight, bias. A shadow is given only where the parameter trains."""
        for role, shadow in self.shadows.items():
            if shadow.device != device or shadow.dtype != _precision(self.parameter(role)):  # the model was moved
                self.observe(role)
        trained = {role: shadow for role, shadow in self.shadows.items() if self.parameter(role).requires_grad}
        return self.samples, trained.get("weight"), trained.get("bias")

    def blank(self, x: Tensor) -> bool:
        """Whether the input is an empty batch: it has nothing to tell."""
        empty = x.dim() > 0 and x.shape[0] == 0
        if empty:
            self.current.blank = True
        return empty

    def trains(self) -> bool:
        """Whether any of the observed parameters is not frozen at the moment."""
        return any(self.parameter(role).requires_grad for role in self.shadows)

    def check(self, samples: int, ctx: Any) -> None:
        """Before the moments of a backward pass: is what they would be added to, and what they are, what it seems?"""
        if ctx.spent:
            raise RuntimeError(
                f"backward ran twice through the same forward pass of layer '{self.name}' (retain_graph=True), which "
                "would count every sample twice: add the losses up and call backward() once."
            )
        ctx.spent = True
        # A forward pass that ran inside a backward pass, in a reentrant checkpoint, belongs to that one.
        self.current.enter(self.name, samples, ctx.outer if ctx.outer != -1 else torch._C._current_graph_task_id())
        if all(self.parameter(role).grad is None for role in self.shadows):
            self.clear()  # left over from a backward pass that no step followed

    def clear(self) -> None:
        """Forget the statistics gathered so far."""
        for leaf in (self.samples, *self.shadows.values()):
            leaf.grad = None


def _precision(parameter: Tensor) -> torch.dtype:
    """What squares are kept in: never half."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
