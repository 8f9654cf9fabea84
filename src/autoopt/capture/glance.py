"""A glance at some samples beside a layer's own pass, which runs as torch runs it.

Where a few samples are enough (see `sampled`), or Σ c² of all of them takes no contribution to be formed, nothing has
to be computed inside the layer's operation. So autograd's own functions run it, forward and backward, and what they
keep is kept here too, until the gradient of the output arrives at their node. That costs a fraction of `Observe`, which
remains for the other layers if all samples are asked for, for compiled passes and where hooks on saved tensors
(checkpoints, offloading) want nothing to be kept.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from autoopt.capture.aside import recording
from autoopt.capture.current import lowered
from autoopt.capture.sampled import Some, squared
from autoopt.capture.site import Site
from autoopt.moments import Operation
from autoopt.moments.operation import owned

ALL = Some(slice(None), 0, 1.0)  # of the samples
GROWS = 8  # times as much memory as its samples take, from which on Σ c² waits for the end of the pass


class Glance:
    """One use of a layer, called with the gradients of what its operation gave: of its output, and of nothing else.

    It is a hook on the node, not on the output: there the hooks of others have done to the gradient what they do.
    """

    part, fold = "", 1

    def __init__(self, operation: Operation, site: Site, kept: tuple[Tensor, ...], samples: int, some: Some) -> None:
        self.operation, self.site, self.kept, self.samples, self.some = operation, site, kept, samples, some
        self.outer, self.spent = -1, False
        site.opened(self)

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        dy = gradients[0]
        if dy is None:
            return
        try:
            self._take(dy)
        except Exception:
            if recording(dy.device):  # else the graph, which ends here, would complain of the branches instead
                self.site.ledger.aside.join()
            raise

    def _take(self, dy: Tensor) -> None:
        site = self.site
        if torch.is_grad_enabled():  # else what a second backward pass adds to the weights would go unseen
            raise RuntimeError(
                f"backward ran through layer '{site.name}' with create_graph=True, as for a gradient penalty: what is "
                "differentiated twice has no statistics. Leave its parameters to another optimizer through "
                "param_groups, or freeze them for that pass."
            )
        roles = [role for role in site.shadows if site.adds_to(role)]
        if not roles:
            site.closed(self)
            return
        graph = site.check(self.samples, self)
        kept, self.kept = self.kept, ()
        if site.repeated:
            self._book(roles, dy, kept)
            return
        for role in roles:
            site.ledger.open(site.names[role], self.samples, graph)
            if site.compares(role):
                site.note(role, self._gradient(role, dy, kept))
        if recording(dy.device):
            site.ledger.aside.do(lambda: self._look(roles, *self._seen(roles, dy, kept)), dy, *kept)
            return
        dy, kept = self._seen(roles, dy, kept)
        if self._grows(roles, dy, kept):
            # Σ c² of it can wait until the pass has freed what others keep; what it takes is copied out of that
            dy, kept = dy.clone(), tuple(tensor.clone() for tensor in kept)
            site.ledger.later(functools.partial(self._look, roles, dy, kept))
        else:
            self._look(roles, dy, kept)

    def _gradient(self, role: str, dy: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        operation = self.operation
        return operation.weight_gradient(dy, kept) if role == "weight" else operation.bias_contributions(dy).sum(0)

    def _seen(self, roles: list[str], dy: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of the samples that are looked at."""
        rows = self.some.rows
        if self.some is ALL:
            return dy, kept
        return dy[rows], self.operation.select(kept, rows) if "weight" in roles else ()

    def _grows(self, roles: list[str], dy: Tensor, kept: tuple[Tensor, ...]) -> bool:
        """Whether Σ c², if it is wanted for every element, takes far more memory than what it is made of."""
        if self.some is ALL or self.site.ledger.total or "weight" not in roles:
            return False
        return self.site.parameter("weight").numel() > GROWS * sum(tensor.numel() for tensor in (dy, *kept))

    def _look(self, roles: list[str], dy: Tensor, kept: tuple[Tensor, ...]) -> None:
        site, operation = self.site, self.operation
        if self.some is ALL:
            self._look_at_all(roles, dy, kept)
            return
        for role in roles:
            weight = role == "weight"
            c = operation.weight_contributions(dy, kept) if weight else operation.bias_contributions(dy)
            site.ledger.add_few(site.names[role], c, self.some.share)

    def _look_at_all(self, roles: list[str], dy: Tensor, kept: tuple[Tensor, ...]) -> None:
        site, operation, total = self.site, self.operation, self.site.ledger.total
        for role in roles:
            weight = role == "weight"
            square = (
                operation.weight_square(dy, kept, total) if weight else squared(operation.bias_contributions(dy), total)
            )
            site.ledger.book(site.names[role], self.samples, square)

    def _book(self, roles: list[str], dy: Tensor, kept: tuple[Tensor, ...]) -> None:
        """As `Observe` does where the layer has other uses."""
        if "weight" in roles:
            self.site.book("weight", self.operation.weight_use(dy, kept), self.samples, self)
        if "bias" in roles:
            self.site.book("bias", self.operation.bias_contributions(dy).__getitem__, self.samples, self)


def suits(site: Site, operation: Operation, x: Tensor, weight: Tensor) -> Some | None:
    """The samples to look at, if a glance at them will do."""
    if site.eager or site.axis or site.folded or site.strided or site.ledger.gathered or torch.compiler.is_compiling():
        return None
    if site.replaced():  # which `Observe` finds out
        return None
    whole = operation.keeps_input and not operation.forms(x)
    some = ALL if whole else site.ledger.sampler.of(operation, x, weight)
    return None if some is None or _packed() else some


def run(site: Site, operation: Operation, x: Tensor, batch: Tensor, some: Some) -> Tensor:
    """The layer's output, on whose way back is a glance."""
    layer: Any = site.layer
    as_it_is = batch is x
    if operation.lowers:  # what autocast would do to the input, done here, so that what is kept is what autograd keeps
        batch = lowered(batch)
    output: Tensor
    kept: tuple[Tensor, ...] = (batch,)
    if operation.keeps_input and as_it_is:
        output = site.plain.forward(layer, batch)
    else:
        output, kept = operation.forward(batch, layer.weight, getattr(layer, "bias", None))
    if output.requires_grad:
        if output._is_view():  # one that is changed in place gets another node, and the hook would be lost
            output = owned(output)
        # Detached: what leads back to the node must not be held by a hook of it.
        kept = tuple(tensor.detach() for tensor in kept) if layer.weight.requires_grad else ()
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(Glance(operation, site, kept, batch.shape[0], some))
    return output


def _packed() -> bool:
    """Whether something else is kept than what autograd is given to keep."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None
