"""A glance at some samples beside a layer's own pass, which runs as torch runs it.

Where a few samples are enough (see `sampled`), or Σ c² of all of them takes no contribution to be formed, nothing has
to be computed inside the layer's operation. So autograd's own functions run it, forward and backward, and what they
keep is kept here too, until the gradient of the output arrives at their node. That costs a fraction of `Observe`, which
remains for the other layers if all samples are asked for, for compiled passes and where hooks on saved tensors
(checkpoints, offloading) want nothing to be kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from autoopt.capture.aside import recording
from autoopt.capture.current import lowered
from autoopt.capture.sampled import SMALL, Look, Some, squared
from autoopt.capture.site import Site
from autoopt.moments import Operation
from autoopt.moments.operation import owned

ALL = Some(slice(None), 0, 1.0)  # of the samples


class Usual(NamedTuple):
    """A layer as it was looked at last: if it is like that again, little has to be asked."""

    some: Some
    shape: torch.Size  # of the input
    dtype: torch.dtype
    parameters: tuple[tuple[str, nn.Parameter], ...]  # role -> what is observed


class Glance:
    """One use of a layer, called with the gradients of what its operation gave: of its output, and of nothing else.

    It is a hook on the node, not on the output: there the hooks of others have done to the gradient what they do.

    Args:
        operation: that of the layer.
        site: the layer's.
        kept: what its operation kept for the weight, if that trains.
        samples: N.
        some: those to look at.
        shape: of the output, where the node is that of a tensor of which it is a view.
        usual: the layer is used as it was last, so that nothing is to be asked of it when the gradient arrives.
    """

    __slots__ = ("__weakref__", "kept", "operation", "outer", "samples", "shape", "site", "some", "spent", "usual")
    part, fold = "", 1
    outer: int  # set by `Site.opened`, as is `spent`
    spent: bool

    def __init__(
        self,
        operation: Operation,
        site: Site,
        kept: tuple[Tensor, ...],
        samples: int,
        some: Some,
        shape: torch.Size | None,
        usual: bool,
    ) -> None:
        self.operation, self.site, self.kept, self.samples, self.some = operation, site, kept, samples, some
        self.shape = shape
        site.opened(self)
        self.usual = usual and self.outer == -1

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        dy = gradients[0]
        if dy is None:
            return
        if self.shape is not None:
            dy = dy.reshape(self.shape)
        site = self.site
        if self.usual and not (self.spent or site.repeated) and site.ledger.as_usual(site, self.samples):
            self.spent = True
            kept, self.kept = self.kept, ()
            self._look(site.names, dy, kept, early=False)
            return
        try:
            self._take(dy)
        except Exception:
            if recording(dy.device):  # else the graph, which ends here, would complain of the branches instead
                site.ledger.aside.join()
            raise

    def _take(self, dy: Tensor) -> None:
        site = self.site
        if torch.is_grad_enabled():  # else what a second backward pass adds to the weights would go unseen
            raise RuntimeError(
                f"backward ran through layer '{site.name}' with create_graph=True, as for a gradient penalty or for "
                "forces: what is differentiated twice has no statistics. Leave its parameters to another optimizer "
                'through param_groups, freeze them for that pass, or make this one with spread="passes".'
            )
        ledger = site.ledger
        names = ledger.reach.among(site)
        if not names:
            site.closed(self)
            return
        graph = site.check(self.samples, self)
        kept, self.kept = self.kept, ()
        if site.repeated:
            self._book(names, dy, kept)
            return
        ledger.open(names.values(), self.samples, graph)
        if not ledger.besides.done.issuperset(names.values()):
            for role in names:
                if site.compares(role):
                    site.note(role, self._gradient(role, dy, kept))
        if recording(dy.device):
            ledger.aside.do(lambda: self._look(names, dy, kept, early=True), dy, *kept)
            return
        self._look(names, dy, kept, early=False)
        if self.outer == -1:
            ledger.smooth(graph)

    def _look(self, names: dict[str, str], dy: Tensor, kept: tuple[Tensor, ...], early: bool) -> None:
        if self.some is ALL:
            self._look_at_all(names, dy, kept)
        else:
            self._look_at_some(names, dy, kept, early)

    def _look_at_some(self, names: dict[str, str], dy: Tensor, kept: tuple[Tensor, ...], early: bool) -> None:
        """Have a kernel do so at once, or set them apart from the others, which are freed as the pass goes on."""
        rows, site = self.some.rows, self.site
        if site.ledger.one.add(self.operation, names, (dy, *kept), self.some):
            return
        parts = self.operation.select(kept, rows) if "weight" in names else ()
        seen: list[Tensor] = []
        for whole, part in zip((dy, *kept), (dy[rows], *parts), strict=False):
            if whole.numel() > SMALL:
                part = part.clone()
            elif early:
                site.ledger.aside.hold(part)
            seen.append(part)
        site.ledger.look(Look(self.operation, names, seen[0], tuple(seen[1:])), self.some, early=early)

    def _gradient(self, role: str, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        operation = self.operation
        return operation.weight_gradient(dy, kept) if role == "weight" else operation.bias_contributions(dy).sum(0)

    def _look_at_all(self, names: dict[str, str], dy: Tensor, kept: tuple[Tensor, ...]) -> None:
        site, operation, total = self.site, self.operation, self.site.ledger.total
        for role, name in names.items():
            weight = role == "weight"
            square = (
                operation.weight_square(dy, kept, total) if weight else squared(operation.bias_contributions(dy), total)
            )
            site.ledger.look_whole(name, square)

    def _book(self, names: dict[str, str], dy: Tensor, kept: tuple[Tensor, ...]) -> None:
        """As `Observe` does where the layer has other uses."""
        if "weight" in names:
            self.site.book("weight", self.operation.weight_use(dy, kept), self.samples, self)
        if "bias" in names:
            self.site.book("bias", self.operation.bias_contributions(dy).__getitem__, self.samples, self)


def suits(site: Site, operation: Operation, x: Tensor, batch: Tensor) -> Some | None:
    """The samples to look at, if a glance at them will do. `batch` is the input x with the samples in front."""
    if torch.compiler.is_compiling():
        return None
    site.usual = None
    if site.eager or site.axis or site.folded or site.strided or site.ledger.gathered:
        return None
    if site.replaced() or _packed() or (batch is not x and batch.dim() > x.dim()):  # which `Observe` sees to
        return None
    weight = site.layer._parameters.get("weight")
    if operation.keeps_input and not operation.forms(batch):
        some: Some | None = ALL
    else:
        some = None if weight is None else site.ledger.sampler.of(operation, batch, weight)
    if some is not None and site.known and site.compared():
        parameters = tuple([(role, site.parameter(role)) for role in site.names])
        site.usual = Usual(some, x.shape, x.dtype, parameters)
    return some


def as_usual(site: Site, x: Tensor) -> Some | None:
    """The samples to look at, if the layer is used as it was last; None: all has to be asked anew.

    In one place and without a call, where it can be: with many small layers this is what a forward pass waits for.
    """
    if torch.compiler.is_compiling():  # first, as what follows is not to be traced
        return None
    usual: Usual | None = site.usual
    if usual is None or x.shape != usual.shape or x.dtype != usual.dtype or not torch.is_grad_enabled():
        return None
    current = site.current
    if current.watch is not None or current.resting or forward_ad._current_level >= 0 or site.ledger.gathered:
        return None
    if site.repeated or site.axis or site.fold != 1 or site.folded or site.strided or site.routed:
        return None
    if torch._C._get_tracing_state() or torch._C._functorch.maybe_current_level() is not None or _packed():
        return None
    own = site.layer._parameters
    for role, parameter in usual.parameters:
        if own.get(role) is not parameter or not parameter.requires_grad:
            return None
    return usual.some


def run(site: Site, operation: Operation, x: Tensor, batch: Tensor, some: Some, *, usual: bool) -> Tensor:
    """The layer's output, on whose way back is a glance. `usual`: `as_usual` has said so."""
    layer: Any = site.layer
    as_it_is = batch is x
    if operation.lowers:  # what autocast would do to the input, done here, so that what is kept is what autograd keeps
        batch = lowered(batch)
    output: Tensor
    kept: tuple[Tensor, ...] = (batch,)
    if operation.keeps_input and as_it_is:
        output = site.plain.forward(layer, batch)
    else:
        output, kept = operation.forward(batch, site.held("weight"), site.held("bias"))
    if not output.requires_grad:
        return output
    # Detached: what leads back to the node must not be held by a hook of it.
    kept = tuple([tensor.detach() for tensor in kept]) if site.held("weight").requires_grad else ()
    base, shape = output._base, None
    if base is not None:
        if base.is_contiguous() and output.is_contiguous() and base.numel() == output.numel():
            shape = output.shape
        else:
            output, base = owned(output), None
    # A view that is changed in place gets another node, and the hook would be lost; its base keeps that of before.
    node: Any = (output if base is None else base).grad_fn
    node.register_prehook(Glance(operation, site, kept, batch.shape[0], some, shape, usual))
    return output


def _packed() -> bool:
    """Whether something else is kept than what autograd is given to keep."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None
