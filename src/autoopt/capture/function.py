"""A layer's operation as one autograd function, which gives second moments as gradients.

Note [shadow leaves]: beside each observed parameter stands a leaf tensor, its shadow, that takes no part in the
forward pass. The backward pass returns Σ_i c_i² as the "gradient" of the shadow. So autograd itself carries the
statistics: they accumulate over micro-batches exactly as `.grad` does, survive activation checkpointing and in-place
activations, and are ordinary outputs for torch.compile. The number of samples travels the same way.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoopt.capture.site import Site
from autoopt.moments import Operation


class Observe(torch.autograd.Function):
    """Runs an operation; its backward pass computes gradients and second moments together."""

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        site: Site,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        samples: Tensor,
        weight_square: Tensor | None,
        bias_square: Tensor | None,
    ) -> Tensor:
        output, kept = operation.forward(x, weight, bias)
        ctx.save_for_backward(weight if ctx.needs_input_grad[2] else None, *kept)
        ctx.operation, ctx.site, ctx.spent = operation, site, False
        ctx.outer = -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        operation, site = ctx.operation, ctx.site
        if not torch.compiler.is_compiling():
            site.check(dy.shape[0], ctx)
        weight, *rest = ctx.saved_tensors
        kept = tuple(rest)
        _, _, needs_x, needs_weight, needs_bias, _, observes_weight, observes_bias = ctx.needs_input_grad
        dx = operation.input_gradient(dy, kept, weight) if needs_x else None
        dw = w2 = db = b2 = None
        if needs_weight or observes_weight:
            dw, w2 = operation.weight_moments(dy, kept, site.total)
        if needs_bias or observes_bias:
            db, b2 = operation.bias_moments(dy, site.total)
        samples = torch.full((), dy.shape[0], dtype=torch.float32, device=dy.device)
        return (
            None, None, dx, dw if needs_weight else None, db if needs_bias else None,
            samples, w2 if observes_weight else None, b2 if observes_bias else None,
        )  # fmt: skip
