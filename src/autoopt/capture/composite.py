"""Layers that use several parameters, or one parameter several times, in one call: recurrent layers and attention.

Such a call has parts, each an autograd function of its own, whose backward pass tells the ledger what samples add.
Dynamo does not look inside: in a compiled model the layer runs between two graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autoopt.capture import sampled
from autoopt.capture.copies import enter
from autoopt.capture.site import Site
from autoopt.moments import Contributions, Product
from autoopt.moments.linear import Linear
from autoopt.moments.operation import moments, owned

PACKING = (
    "have it sorted by pack_padded_sequence(..., enforce_sorted=False) alone, give the layer the padded tensor and "
    'take its outputs at the lengths, or make the optimizer with spread="passes"'
)


class Composite(Site):
    """A layer whose call consists of parts. Its parameters have no shadows.

    A part's context has `part`, its name in the layer, and how the rows of samples lie (`fold`, `strided`, `sorted`),
    beside what any site's has: `outer` and `spent`. What it reports is summed over the rows of each sample before.
    """

    eager = True
    advice = (
        "Give the layer (batch, time, features) or (batch · parts, time, features), the parts of a sample one after "
        f"the other. If it is given a PackedSequence, {PACKING}. Or leave it to another optimizer through param_groups."
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shared: set[str] = set()  # names of parameters that other layers hold too
        self.sorted = False  # the call that is under way was given rows that may lie in another order than the samples
        self._parts: dict[str, int] = {}  # part -> the backward pass that last used it
        self._sorted = -1  # the backward pass that last had such rows

    def observe(self, role: str, name: str, *, shared: bool) -> None:
        """Report on the parameter that has this role; `shared`: other layers hold it too."""
        self.names[role] = name
        if shared:
            self.shared.add(name)

    def parameter(self, role: str) -> nn.Parameter:
        """A parameter of the layer, or of a child that it takes parameters of without calling it."""
        owner, _, key = role.rpartition(".")
        parameter = getattr(self.layer.get_submodule(owner), key)
        if not isinstance(parameter, nn.Parameter):
            raise RuntimeError(
                f"'{role}' of layer '{self.name}' is no parameter any more (a parametrization, pruning): call the "
                "optimizer's detach() before such a change, and make it anew after."
            )
        return parameter

    def begin(self, rows: int) -> None:
        """A call begins, with so many rows."""
        self.count(rows)
        self.check_fold(rows)

    def check(self, rows: int, ctx: Any) -> int:
        """As in any site, for each part on its own."""
        known = self.ledger.names
        origins = [known[p] for listed in self.origins.values() for p in listed if p.requires_grad and p in known]
        if not any(map(self.adds_to, self.names)) and not any(map(self.ledger.adds_to, origins)):
            self.closed(ctx)  # autograd.grad, which counts nothing
            return -1
        self.entered = before = self._parts.get(ctx.part, -1)
        graph = super().check(rows, ctx)
        self._parts[ctx.part] = self.entered
        self._sorted = graph if ctx.sorted else self._sorted
        if self._sorted == graph and (before == graph or self.shared or self.lent):
            raise RuntimeError(
                f"layer '{self.name}' ({self.plain.__name__}) is given a PackedSequence that was sorted before it was "
                "packed, in one of several uses of its parameters, so that row i of each need not be of one sample: "
                f"{PACKING}."
            )
        return graph

    def spread(self, copies: Tensor) -> Tensor:
        """What each sample has, (samples, ...), for each of its rows."""
        if self.strided:
            return copies.repeat(self.fold, *[1] * (copies.dim() - 1))
        return copies.repeat_interleave(self.fold, 0)

    def product(self, weight: Tensor, use: Product, ctx: Any) -> Tensor:
        """The gradient of a weight, whose contributions are reported."""
        name = self.sole(weight)
        if name is not None:
            some = self.ledger.sampler.of(Linear(), use.a, weight)
            _, (gradient, square) = sampled.moments(Linear(), use.delta, (use.a,), None, some, self.total)
            self.ledger.add_square(name, len(use.delta), square, ctx.outer)
            return gradient
        self.enter(weight, len(use.delta), use, ctx)
        return use.gradient()

    def sum(self, bias: Tensor, c: Tensor, ctx: Any) -> Tensor:
        """The gradient of a bias, whose contributions c are reported."""
        name = self.sole(bias)
        if name is not None:
            gradient, square = moments(c, self.total)
            self.ledger.add_square(name, len(c), square, ctx.outer)
            return gradient
        self.enter(bias, len(c), c.__getitem__, ctx)
        return c.sum(0)

    def sole(self, tensor: Tensor) -> str | None:
        """The name of a parameter of which no other use is to be expected in this backward pass; of others None."""
        name = self.ledger.names.get(tensor) if isinstance(tensor, nn.Parameter) else None
        return None if self.repeated or name in self.shared else name

    def enter(self, tensor: Tensor, samples: int, contributions: Contributions, ctx: Any) -> None:
        """Enter one of several uses of a parameter, or of what is computed from parameters, into the ledger."""
        enter(self.ledger, tensor, samples, contributions, ctx.outer)


class LinearUse(torch.autograd.Function):
    """x Wᵀ + b as a part of a call, over (samples, features) or (samples, positions, features).

    `of_weight` and `of_bias` report the contributions to W and b and return the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        site: Composite,
        part: str,
        of_weight: Callable[[Product, Any], Tensor],
        of_bias: Callable[[Tensor, Any], Tensor] | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[4] else None)
        ctx.site, ctx.of_weight, ctx.of_bias = site, of_weight, of_bias
        describe(ctx, part)
        return owned(F.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.site.check(len(dy), ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[4:]
        dx = dy @ weight if needs_x else None
        dw = ctx.of_weight(of_samples(Linear().weight_use(dy, (x,)), ctx), ctx) if needs_weight else None
        db = ctx.of_bias(summed(Linear().bias_contributions(dy), ctx), ctx) if needs_bias else None
        return None, None, None, None, dx, dw, db


def describe(ctx: Any, part: str) -> None:
    """What a site asks of a part's context."""
    site: Composite = ctx.site
    ctx.part, ctx.fold, ctx.strided, ctx.sorted = part, site.fold, site.strided, site.sorted
    site.opened(ctx)


def of_samples(use: Product, ctx: Any) -> Product:
    """The contributions of samples from those of rows: what is summed over them are more positions."""
    if ctx.fold == 1:
        return use
    return Product(_grouped(use.delta, ctx).flatten(1, 2), _grouped(use.a, ctx).flatten(1, 2))


def summed(c: Tensor, ctx: Any) -> Tensor:
    """The same where they are formed."""
    return c if ctx.fold == 1 else _grouped(c, ctx).sum(1)


def _grouped(rows: Tensor, ctx: Any) -> Tensor:
    """(rows, ...) -> (samples, rows of each, ...)."""
    grouped: Tensor = rows.unflatten(0, (ctx.fold, -1) if ctx.strided else (-1, ctx.fold))
    return grouped.transpose(0, 1) if ctx.strided else grouped
