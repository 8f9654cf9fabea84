"""One sample of a layer on a GPU, in one kernel: what `sampled.Few` does in a dozen operations.

Where the host is what a step waits for, to start a kernel is what costs. So here nothing is copied or kept for later,
and how to start it is decided once, as long as the layer is used in the same way.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autoopt.capture.sampled import Some
from autoopt.moments import Operation
from autoopt.moments.building import available, stream

if TYPE_CHECKING:  # it imports Triton
    from autoopt.moments.one import Plan

ROWS = 64  # of a table of sums: one for each parameter
Where = tuple[torch.device, int, int]  # a table: on which device, the how-manieth, and on which stream


class Way(NamedTuple):
    """How a layer's parameters are served, and for which use of the layer."""

    given: Any  # all that it goes by
    plan: "Plan | None"  # None: by no kernel
    table: tuple[torch.device, int]  # that the sums go to: where, and the how-manieth
    rows: dict[str, int]  # of it, those of the parameters


class Alone:
    """What one sample of each layer adds to parameters, squared, in the pass that is under way.

    Args:
        total: only the total of Σ c² is asked for.
        parameters: all that there may be, by name.
    """

    def __init__(self, total: bool, parameters: Mapping[str, Tensor]) -> None:
        self.total, self.parameters = total, parameters
        self._ways: dict[tuple[str, ...], Way] = {}  # by the names of the parameters
        self._rows: dict[torch.device, int] = {}  # of all tables that are taken
        self._tables: dict[Where, Tensor] = {}  # parts of totals; those of a pass
        self._entered: list[tuple[Where, dict[str, int]]] = []  # and in which rows of which of them it left something
        self._found: dict[str, Tensor] = {}

    def add(self, operation: Operation, names: dict[str, str], tensors: tuple[Tensor, ...], some: Some) -> bool:
        """Enter what a layer's sample adds to parameters, role -> name, the weight first; False: no kernel can.

        `tensors`: the gradient of the layer's output and what was kept of its input, of all samples.
        """
        if len(tensors) == 1:  # the weight is frozen, and nothing was kept
            return False
        dy, x = tensors[:2]
        if (dy.data_ptr() | x.data_ptr()) % 16:  # else as Triton takes what torch allocates to lie
            return False
        of = tuple(names.values())
        layouts = None if self.total else [self.parameters[name].stride() for name in of]
        types = [tensor.dtype for tensor in tensors]
        given = operation.kind, some, dy.shape, dy.stride(), x.shape, x.stride(), types, dy.device, layouts
        way = self._ways.get(of)
        if way is None or way.given != given:
            way = self._ways[of] = self._way(given, operation, names, tensors, some)
        plan = way.plan
        if plan is None:
            return False
        if self.total:
            where = *way.table, stream(dy.device)  # what another stream does to a table would have to be waited for
            table = self._tables.get(where)
            if table is None:
                table = self._tables[where] = torch.zeros(ROWS, plan.width, device=dy.device)
            if plan.start(tensors, table, table):
                self._entered.append((where, way.rows))
                return True
        else:
            made = [torch.empty_like(self.parameters[name], dtype=torch.float32) for name in of]
            if plan.start(tensors, made[0], made[-1]):
                self._found.update(zip(of, made, strict=True))
                return True
        self._ways[of] = way._replace(plan=None)  # it cannot be built
        return False

    def squares(self) -> dict[str, Tensor]:
        """The estimate of Σ c² over all samples, for each of the parameters; these are forgotten."""
        sums = {which: table.sum(1).unbind() for which, table in self._tables.items()}
        found = self._found
        for where, rows in self._entered:
            for name, row in rows.items():
                found[name] = sums[where][row]
        self.clear()
        return found

    def clear(self) -> None:
        self._tables, self._entered, self._found = {}, [], {}

    def _way(
        self, given: Any, operation: Operation, names: dict[str, str], tensors: tuple[Tensor, ...], some: Some
    ) -> Way:
        known, device = self._ways.get(tuple(names.values())), tensors[0].device
        table, rows = (known.table, known.rows) if known and known.table[0] == device else self._take(device, names)
        if some.number > 1 or not available(device):
            return Way(given, None, table, rows)
        from autoopt.moments import one

        strides = {role: _strides(self.parameters[name]) for role, name in names.items()}
        rows_of_totals = list(rows.values()) if self.total else None
        plan = one.plan(operation, tensors, some.rows.start, some.share, strides, rows_of_totals)
        return Way(given, plan, table, rows)

    def _take(self, device: torch.device, names: dict[str, str]) -> tuple[tuple[torch.device, int], dict[str, int]]:
        """Rows of a table that no other layer has."""
        first = self._rows.get(device, 0)
        if first % ROWS + len(names) > ROWS:
            first += -first % ROWS
        self._rows[device] = first + len(names)
        return (device, first // ROWS), {name: first % ROWS + i for i, name in enumerate(names.values())}


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Of a tensor made like the parameter: its own, where these leave no gaps."""
    return torch.empty_like(parameter, device="meta").stride()
