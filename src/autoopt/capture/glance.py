"""A glance at a few samples beside a layer's own pass, which runs as torch runs it.

Where a few samples are enough (see `sampled`), nothing has to be computed inside the layer's operation. So autograd's
own functions run it, forward and backward, and what they keep is kept here too, until the gradient of the output
arrives at a hook. That costs a fraction of `Observe`, which remains for all samples, for compiled passes and where
hooks on saved tensors (checkpoints, offloading) want nothing to be kept.
"""

from typing import Any

import torch
from torch import Tensor

from autoopt.capture.sampled import Some
from autoopt.capture.site import Site
from autoopt.moments import Operation


class Glance:
    """One use of a layer, called with the gradient of its output."""

    part, fold = "", 1

    def __init__(self, operation: Operation, site: Site, kept: tuple[Tensor, ...], samples: int, some: Some) -> None:
        self.operation, self.site, self.some, self.samples = operation, site, some, samples
        self.kept = tuple(tensor.detach() for tensor in kept)
        self.outer, self.spent = -1, False
        site.opened(self)

    def __call__(self, dy: Tensor) -> None:
        site, ledger, some = self.site, self.site.ledger, self.some
        roles = [role for role in site.shadows if site.adds_to(role)]
        if not roles:
            site.closed(self)
            return
        site.check(self.samples, self)
        operation, dy, kept, self.kept = self.operation, dy.detach(), self.kept, ()
        if site.repeated:
            if "weight" in roles:
                site.book("weight", operation.weight_use(dy, kept), self.samples, self)
            if "bias" in roles:
                site.book("bias", operation.bias_contributions(dy).__getitem__, self.samples, self)
            return
        dy = dy[some.rows]
        with torch.no_grad():
            for role in roles:
                if role == "weight":
                    c = operation.weight_contributions(dy, operation.select(kept, some.rows))
                else:
                    c = operation.bias_contributions(dy)
                ledger.add_some(site.names[role], self.samples, c, some.share, self.outer)


def suits(site: Site, operation: Operation, x: Tensor, weight: Tensor) -> Some | None:
    """The samples to look at, if a glance at them will do."""
    if site.eager or site.axis or site.folded or site.strided or site.ledger.gathered or torch.compiler.is_compiling():
        return None
    some = site.ledger.sampler.of(operation, x, weight)
    return None if some is None or _packed() else some


def run(site: Site, operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None, some: Some) -> Tensor:
    """The layer's output, on whose way back is a glance."""
    output, kept = operation.forward(x, weight, bias)
    if output.requires_grad:
        output.register_hook(Glance(operation, site, kept if weight.requires_grad else (), len(x), some))
    return output


def _packed() -> bool:
    """Whether something else is kept than what autograd is given to keep."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None
