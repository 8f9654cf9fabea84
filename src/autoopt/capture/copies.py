"""Copies of a parameter, one for each sample: what autograd returns for them is what each sample adds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autoopt.capture.ledger import Ledger, sources
from autoopt.moments import Contributions

Sole = Callable[[Tensor], bool]
"""Whether the parameters that a tensor was computed from have no other use in the backward pass."""


class Copies(torch.autograd.Function):
    """A tensor computed from parameters alone, once for every sample: (samples, *shape)."""

    @staticmethod
    def forward(ctx: Any, derived: Tensor, samples: int, ledger: Ledger, sole: Sole = lambda _: False) -> Tensor:
        ctx.derived, ctx.ledger, ctx.sole, ctx.spent = derived, ledger, sole, False
        ctx.outer = torch._C._current_graph_task_id()
        return derived.expand(samples, *derived.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor) -> tuple[Tensor, None, None, None]:
        once(ctx)
        enter(ctx.ledger, ctx.derived, len(c), c.__getitem__, ctx.outer, sole=ctx.sole(ctx.derived))
        return c.sum(0), None, None, None


class Rows(torch.autograd.Function):
    """A tensor computed from parameters alone, each of whose rows is used by one sample: (samples, rows, *rest)."""

    @staticmethod
    def forward(ctx: Any, derived: Tensor, samples: int, ledger: Ledger, sole: Sole) -> Tensor:
        ctx.derived, ctx.ledger, ctx.sole, ctx.spent = derived, ledger, sole, False
        ctx.outer = torch._C._current_graph_task_id()
        rows: Tensor = derived.unflatten(0, (samples, -1))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor) -> tuple[Tensor, None, None, None]:
        def contributions(rows: slice) -> Tensor:
            samples = range(len(c))[rows]
            alone = c.new_zeros(len(samples), *c.shape)
            alone[range(len(alone)), samples] = c[rows]
            return alone.flatten(1, 2)

        once(ctx)
        enter(ctx.ledger, ctx.derived, len(c), contributions, ctx.outer, sole=ctx.sole(ctx.derived))
        return c.flatten(0, 1), None, None, None


def once(ctx: Any) -> None:
    """Refuse a second backward pass through the same forward pass."""
    names = [ctx.ledger.names[p] for p in sources(ctx.derived) if p in ctx.ledger.names]
    if not any(map(ctx.ledger.adds_to, names)):  # autograd.grad, which counts nothing
        return
    if ctx.spent:
        raise RuntimeError(
            f"backward ran twice through the same forward pass of parameter '{', '.join(names)}' (retain_graph=True), "
            "which would count every sample twice: add the losses up and call backward() once."
        )
    ctx.spent = True


def enter(
    ledger: Ledger, derived: Tensor, samples: int, contributions: Contributions, outer: int, *, sole: bool = False
) -> None:
    """Tell the ledger what each sample adds to a parameter, or to what was computed from parameters.

    `sole`: they have no other use in the backward pass, so nothing has to be kept until its end.
    """
    if not isinstance(derived, nn.Parameter) or derived not in ledger.names:
        ledger.add_derived(derived, samples, contributions, sole=sole, outer=outer)
    elif sole:
        square = ledger.second_moment([contributions], samples, derived)
        ledger.add_square(ledger.names[derived], samples, square, outer)
    else:
        ledger.add(ledger.names[derived], samples, contributions, outer)
