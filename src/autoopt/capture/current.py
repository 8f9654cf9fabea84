"""The backward pass that is under way."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoopt.capture.aside import recording
from autoopt.capture.distributed import active_group

NOT_SAMPLES = (
    "so it is not clear which rows belong to one sample. The first axis of every layer's input must be the batch: "
    "reshape (batch · time, features) to (batch, time, features) before the layer, or make the optimizer with "
    'spread="passes", which needs no samples.'
)


def observable() -> bool:
    """Whether a forward pass is one that a backward pass into `.grad` may follow."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        # not is_exporting(), which in torch 2.10 and 2.11 is True in every graph
        return torch.is_grad_enabled() and not torch.compiler._is_exporting_flag
    return not torch._C._get_tracing_state() and torch._C._functorch.maybe_current_level() is None


def lowered(x: Tensor) -> Tensor:
    """What autocast makes of an operand of an operation that it runs in its lower precision."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def operands(*tensors: Tensor | None) -> list[Any]:
    """The same of all operands, some of which may be missing."""
    return [None if tensor is None else lowered(tensor) for tensor in tensors]


def executes(node: Any) -> bool:
    """Whether the backward pass that runs this reaches a node of the graph. Those that it gives back it does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what torch says of leaves that autograd.grad was asked for
        return False


@dataclass
class Pass:
    """What is known of the backward pass that is under way, shared by all that report to an optimizer.

    Wrong statistics would train badly without a word, so what cannot be done exactly is refused.
    """

    ended: Callable[[], None]  # called at the end of each backward pass
    graph: int = -1  # autograd's number for it; they rise
    queued: int = -1  # the pass at whose end `ended` is already due
    count: int = 0  # passes that came to their end
    unfinished: bool = False  # it began and has not ended: an error on the way
    failed: bool = False  # one before it did not end, and its gradients were not cleared
    cleared: Callable[[], bool] = lambda: False  # whether no parameter has a gradient
    anew: bool = False  # none had when the pass began, and the one before it ended
    resting: bool = False  # nothing is observed until the next step, which does without
    blank: bool = False  # an empty batch passed, whose gradients of zero come without statistics
    samples: int = 0
    first: str = ""
    gathered: int = 0  # samples of all passes since the statistics were cleared
    group: "dist.ProcessGroup | None" = None  # the ranks that share the batch
    inputs: dict[str, Tensor] = field(default_factory=dict)  # weight that takes data -> its mean square, see `inputs`
    withheld: set[str] = field(default_factory=set)  # parameters whose gradients FSDP keeps until it may reduce them
    left: tuple[str, Tensor] | None = None  # a parameter that had a gradient before the first pass, and if not of zeros
    clears: bool = False  # whether gradients were seen to be cleared by zeros
    met: set[str] = field(default_factory=set)  # layers that a Watch saw take samples, or that a checkpoint ran again
    watch: Any = None  # the Watch that looks at the forward pass under way, if one does
    entrance: Any = None  # the Entrance that says where the samples lie in the layers' inputs

    def empty(self) -> None:
        """A forward pass has no samples on this rank."""
        self.blank = True
        if not torch.compiler.is_compiling():
            self.group = active_group() or self.group

    def due(self) -> None:
        """Have `ended` called when the backward pass that runs this ends."""
        graph = torch._C._current_graph_task_id()
        if graph != self.queued:
            self.queued = graph
            torch.autograd.Variable._execution_engine.queue_callback(self.ended)

    def enter(self, name: str, samples: int, outer: int = -1) -> int:
        """A layer's or a parameter's backward begins, with so many samples. Returns autograd's number for the pass.

        A forward pass that ran inside a backward pass, in a reentrant checkpoint, belongs to that one: `outer`.
        """
        running = torch._C._current_graph_task_id()
        if running != self.queued:
            self.due()
        graph = outer if outer != -1 else running
        if graph != self.graph:
            self._begin(graph, name, samples)
        if samples != self.samples:
            raise RuntimeError(self._unequal(name, samples))
        return graph

    def _unequal(self, name: str, samples: int) -> str:
        if name == self.first:
            return (
                f"layer '{name}' got {self.samples} rows in one forward pass and {samples} in another, and one "
                "backward pass goes through both, so that it is not clear which rows belong to one sample. Call the "
                "model once, with torch.cat of both batches, or call backward() for each."
            )
        return (
            f"layer '{name}' got {samples} rows where '{self.first}' got {self.samples} in the same backward pass, "
            f"{NOT_SAMPLES}"
        )

    def leave(self, name: str, gradient: Tensor) -> None:
        """A parameter has a gradient of which nothing is known: zeros, or what was there at the last step."""
        if self.left is None and not self.clears:
            self.left = name, gradient.any()

    def refuse_left(self) -> None:
        """See, once, that gradients are cleared between two steps. This reads the device, where they are not None."""
        if torch.compiler.is_compiling() or self.left is None or recording(self.left[1].device):
            return
        name, filled = self.left
        if filled.item():
            raise RuntimeError(
                f"the gradient of parameter '{name}' was not cleared since the last step(): it holds what earlier "
                "batches added, which are not among the samples that were measured since. Call zero_grad() before the "
                "backward pass. If something else called backward() after that, a penalty on the weights say, have it "
                "do so after the loss."
            )
        self.clears = True

    def _begin(self, graph: int, name: str, samples: int) -> None:
        cleared = self.cleared()
        if cleared:  # whoever did so: the model's own zero_grad, say
            self.left = None
        self.failed = (self.failed or self.unfinished) and not cleared
        self.anew = cleared and not self.unfinished
        self.unfinished = True
        self._refuse_nested(graph)
        self.graph, self.samples, self.first = graph, samples, name
        self.gathered += samples

    def whole(self) -> bool:
        """Whether the pass that ends now is all that is under way, not a part that a reentrant checkpoint runs."""
        graph = torch._C._current_graph_task_id()
        self._refuse_nested(graph)
        return not (self.unfinished and graph > self.graph)

    def _refuse_nested(self, graph: int) -> None:
        """A forward pass knows the backward pass that ran it, but not whether that is a part of yet another one."""
        if graph < self.graph:
            self.unfinished = True
            raise RuntimeError(
                "a checkpoint lies in a checkpoint, both with use_reentrant=True, so that it is not clear which uses "
                "of a layer belong to one backward pass. Use use_reentrant=False."
            )

    def finish(self) -> None:
        """The pass came to its end."""
        self.count += 1
        self.unfinished = False
