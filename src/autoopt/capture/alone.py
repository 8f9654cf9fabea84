"""One sample of a layer on a GPU, in one kernel: what `sampled.Few` does in a dozen operations.

Where the host is what a step waits for, to start a kernel is what costs. So here nothing is copied or kept for later.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoopt.capture.sampled import Some
from autoopt.moments import Operation
from autoopt.moments.building import available, built

if TYPE_CHECKING:  # which imports Triton
    from autoopt.moments.one import Plan

ROWS = 64  # of a table of sums: parameters


class Alone:
    """What one sample of each layer adds to parameters, squared, in the pass that is under way.

    Args:
        total: only the total of Σ c² is asked for.
    """

    def __init__(self, total: bool) -> None:
        self.total = total
        self._plans: dict[str, tuple[Any, Plan | None]] = {}  # of the layer with the parameter: for what, how
        self._tables: list[tuple[list[str], Tensor]] = []  # parts of totals, a row for each of the parameters
        self._found: dict[str, Tensor] = {}

    def add(
        self,
        operation: Operation,
        names: dict[str, str],
        tensors: Sequence[Tensor],
        some: Some,
        parameters: Sequence[Tensor],
    ) -> bool:
        """Enter what a layer's sample adds to `parameters`, in the order of `names`; False: no kernel can.

        `tensors`: the gradient of the layer's output and what was kept of its input, of all samples.
        """
        if some.number > 1 or not available(tensors[0].device):
            return False
        plan = self._plan(operation, names, tensors, some, parameters)
        if plan is None:
            return False
        places = [self._place(name, parameter) for name, parameter in zip(names.values(), parameters, strict=True)]
        (weight, weight_at), (bias, bias_at) = places[0], places[-1]
        if built(lambda: plan(tensors, weight, bias, weight_at, bias_at)) is None:
            self.clear()  # nothing else is there, as no kernel was ever built
            return False
        return True

    def squares(self) -> dict[str, Tensor]:
        """The estimate of Σ c² over all samples, for each of the parameters; these are forgotten."""
        found = self._found
        for names, table in self._tables:
            found |= zip(names, table.sum(1).unbind(), strict=False)
        self.clear()
        return found

    def clear(self) -> None:
        self._tables, self._found = [], {}

    def _plan(
        self,
        operation: Operation,
        names: dict[str, str],
        tensors: Sequence[Tensor],
        some: Some,
        parameters: Sequence[Tensor],
    ) -> "Plan | None":
        """How to do it: as the last time, if all that a plan goes by is the same."""
        dy, x = tensors[:2]
        aligned = not (dy.data_ptr() | x.data_ptr()) % 16
        seen = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        formats = [] if self.total else [parameter.stride() for parameter in parameters]
        given = operation.kind, *names, dy.device, some.rows.start, some.share, aligned, seen, formats
        name = next(iter(names.values()))
        known = self._plans.get(name)
        if known is None or known[0] != given:
            from autoopt.moments import one

            strides = {role: _strides(parameter) for role, parameter in zip(names, parameters, strict=True)}
            how = one.plan(operation, tensors, some.rows.start, some.share, strides, self.total) if aligned else None
            known = self._plans[name] = given, how
        return known[1]

    def _place(self, name: str, parameter: Tensor) -> tuple[Tensor, int]:
        """Where the kernel is to write what it finds of a parameter: a tensor, and from which element of it on."""
        if not self.total:
            self._found[name] = torch.empty_like(parameter, dtype=torch.float32)
            return self._found[name], 0
        from autoopt.moments.one import WIDTH

        if not self._tables or len(self._tables[-1][0]) == ROWS or self._tables[-1][1].device != parameter.device:
            self._tables.append(([], torch.zeros(ROWS, WIDTH, device=parameter.device)))
        names, table = self._tables[-1]
        names.append(name)
        return table, (len(names) - 1) * WIDTH


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Of a tensor made like the parameter: its own, where these leave no gaps."""
    return torch.empty_like(parameter, device="meta").stride()
