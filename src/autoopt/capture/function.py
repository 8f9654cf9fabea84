"""A layer's operation as one autograd function, which gives second moments as gradients.

Note [shadow leaves]: beside each observed parameter stands a leaf tensor, its shadow, that takes no part in the
forward pass. The backward pass returns Σ_i c_i² as the "gradient" of the shadow. So autograd itself carries the
statistics: they survive activation checkpointing and in-place activations, and are ordinary outputs for torch.compile.
In a compiled pass the number of samples travels the same way; an eager one counts on the host. At the end of the
backward pass the ledger takes them over and adds up those of all micro-batches. What is used several times goes to the
ledger from the start, by what each sample adds.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoopt.capture.current import executes
from autoopt.capture.sampled import bias_moments, moments
from autoopt.capture.site import Site
from autoopt.moments import Operation


class Observe(torch.autograd.Function):
    """Runs an operation; its backward pass computes gradients and second moments together."""

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        site: Site,
        derived: dict[str, Tensor | None] | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Tensor | None,
        weight_square: Tensor | None,
        bias_square: Tensor | None,
    ) -> Tensor:
        output, kept = operation.forward(x, weight, bias)
        ctx.save_for_backward(weight if ctx.needs_input_grad[3] else None, *kept)
        ctx.operation, ctx.site, ctx.derived = operation, site, derived or {}
        ctx.some = site.ledger.sampler.of(operation, x, weight)
        ctx.part, ctx.fold = "", 1 if operation.positional else site.fold
        if not torch.compiler.is_compiling():
            site.opened(ctx)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        operation, site, rows = ctx.operation, ctx.site, dy.shape[0]
        _, _, _, needs_x, needs_weight, needs_bias, compiled, observes_weight, observes_bias = ctx.needs_input_grad
        adds = False
        if not torch.compiler.is_compiling():
            # of weight and bias
            adds = any(executes(node) for node, _ in ctx.next_functions[1:3] if node is not None)
            # what is frozen since the forward pass is added to no more
            observes_weight = observes_weight and site.parameter("weight").requires_grad
            observes_bias = observes_bias and site.parameter("bias").requires_grad
            if adds:
                site.check(rows, ctx)
            else:
                site.closed(ctx)
        weight, *rest = ctx.saved_tensors
        kept = tuple(rest)
        weight = weight if needs_x else None
        dx = dw = w2 = db = b2 = None
        if needs_weight and site.books("weight", ctx.fold):
            dx, dw = operation.gradients(dy, kept, weight)
            site.book("weight", operation.weight_use(dy, kept), rows, ctx)
        elif needs_weight or observes_weight:
            dx, (dw, w2) = moments(operation, dy, kept, weight, ctx.some, site.total)
        elif needs_x:
            dx = operation.input_gradient(dy, kept, weight)
        if needs_bias and site.books("bias", ctx.fold):
            contributions = operation.bias_contributions(dy)
            db = contributions.sum(0)
            site.book("bias", contributions.__getitem__, rows, ctx)
        elif needs_bias or observes_bias:
            db, b2 = bias_moments(operation, dy, ctx.some, site.total)
        if adds:
            for role, gradient, square in (("weight", dw, w2), ("bias", db, b2)):
                if gradient is not None and square is not None and site.compares(role) and site.adds_to(role):
                    site.note(role, gradient)
        counts = None
        if w2 is not None or b2 is not None:
            if compiled:
                count = torch.full((), rows, dtype=torch.float32, device=dy.device)
                counts = torch.stack([count, torch.ones_like(count)])
            elif adds:
                site.holds(rows)
        return (
            None, None, None, dx, dw if needs_weight else None, db if needs_bias else None,
            counts, w2 if observes_weight else None, b2 if observes_bias else None,
        )  # fmt: skip
