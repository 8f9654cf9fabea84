"""The parameters of one group on one device, laid out so that a step is a few operations on all of them together.

Every tensor becomes rows of ROW elements, the last one filled up with zeros. Elementwise work is then one operation on
a (rows, ROW) matrix, a sum over a unit is a sum over its rows, and a number per unit reaches its elements by its rows:
the count of kernels does not grow with the count of tensors. A unit is what shares a rate: a tensor, a layer, a group.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.capture import sharded, total
from autoopt.capture.inputs import LOOKS

ROW = 512
PATTERNS = 64  # of missing gradients to remember
RUN = 32  # rows that are summed up one after the other
AVERAGE = "average"  # the buffer that holds the average of the weights, and so starts with them
ENLARGED = "enlarged"  # the statistic that says by how much small inputs ask for larger weights, if they do
HELD = "held"  # the statistic that holds the last V̂ measured, for the steps that measure none
STATISTICS = torch.float64  # a handful of numbers per unit, whose differences matter


class Bucket:
    """Layout and state. The state of a parameter (optimizer.state[p]) is views of what the bucket holds.

    Args:
        members: (name, parameter, key of its unit); the same device and dtype for all.
        statistics: what the rule keeps for each unit, a number or a vector, and its value at the start.
        buffers: names of the (rows, ROW) matrices that the optimizer keeps, zero at first but for AVERAGE.
        state: what is already known of each parameter (after load_state_dict), in the order of `members`.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, nn.Parameter, Any]],
        statistics: Mapping[str, float | Sequence[float]],
        buffers: Sequence[str],
        state: Sequence[dict[str, Any]],
    ) -> None:
        units = {key: number for number, key in enumerate(dict.fromkeys(key for _, _, key in members))}
        order = sorted(range(len(members)), key=lambda i: units[members[i][2]])  # a unit's rows side by side
        self.names = [members[i][0] for i in order]
        self.params = [members[i][1] for i in order]
        self.units = [units[members[i][2]] for i in order]
        self.device, self.dtype = self.params[0].device, self.params[0].dtype
        self.buildable = True  # kernels, as far as is known
        self.ordinary = all(type(p) in (Tensor, nn.Parameter) for p in self.params)  # what is at their address is all
        self.compute = torch.float64 if self.dtype == torch.float64 else torch.float32

        # the ranks that hold the other rows, if the parameters are sharded
        self.group = sharded.group_of(self.params[0]) if sharded.is_sharded(self.params[0]) else None
        here = self.here(self.params)
        rows = [-(-p.numel() // ROW) for p in here]
        self.zero, self.one = self._zeros(), self._zeros() + 1
        self.absent = [self.zero.expand(p.shape) for p in here]  # what stands for a tensor that is not there
        left = [r * ROW - p.numel() for p, r in zip(here, rows, strict=True)]
        self.pads = [[self._zeros(pad)] if pad else [] for pad in left]  # of the last row
        self.shape = sum(rows), ROW
        starts = [*itertools.accumulate(rows, initial=0)]
        self.layouts = self._layouts()
        # Elements keep the order that they have in memory (channels last, say), so that nothing has to be turned.
        self.orders = [_order(p) if self.group is None else None for p in here]
        strides = [_strides(p.shape, order) for p, order in zip(here, self.orders, strict=True)]
        self.places = [(p.shape, s, r * ROW) for p, s, r in zip(here, strides, starts, strict=False)]
        self.single = len(units) == len(self.params)  # every tensor is a unit of its own
        tensor_of = torch.repeat_interleave(torch.tensor(rows))
        unit_of = torch.tensor(self.units)
        self.unit_of_tensor = unit_of.to(self.device)
        self.tensor_of_row = tensor_of.to(self.device)
        self.first_rows = torch.tensor(starts[:-1]).to(self.device)  # of each tensor
        self.sizes = torch.tensor([p.numel() for p in here]).to(self.device)  # of each tensor, in elements
        self.unit_of_row = unit_of[tensor_of].to(self.device)
        # what is indexed by these broadcasts over a row
        self.tensor_column, self.unit_column = self.tensor_of_row.unsqueeze(1), self.unit_of_row.unsqueeze(1)
        rows_per_unit = [0] * len(units)
        for unit, count in zip(self.units, rows, strict=True):
            rows_per_unit[unit] += count
        # where each run of rows to sum up begins, and the last one ends; then of those sums, ...
        self.runs = [torch.tensor([0, *itertools.accumulate(run)]).to(self.device) for run in _runs(rows_per_unit)]
        elements = torch.tensor([float(p.numel()) for p in self.params], dtype=STATISTICS)
        self.elements = torch.zeros(len(units), dtype=STATISTICS).index_add(0, unit_of, elements).to(self.device)
        self.tensors_per_unit = torch.bincount(unit_of, minlength=len(units)).to(self.device)

        self.buffers = {name: self._zeros(*self.shape) for name in buffers}
        self.steps = torch.zeros(len(self.params), dtype=STATISTICS, device=self.device)  # t of each tensor
        self.statistics = {name: self._start(value, len(units)) for name, value in statistics.items()}
        # addresses that the device knows, where it does, and whether all are those of 16 bytes each; see `fused`
        self.tables: dict[str, tuple[list[int], Tensor, bool]] = {}
        # for the tables of CUDA graphs to come, memory of the host and of the device; and those that graphs have
        self.spares: dict[str, tuple[Tensor, Tensor]] = {}
        self.recorded: list[tuple[Tensor, Tensor]] = []
        self.looks = LOOKS if self.single else 0  # steps with other ranks that may still ask how large the inputs are
        self._present: dict[tuple[bool, ...], Tensor] = {}
        self._scratch: dict[str, Tensor] = {}
        self._viewed: tuple[Tensor, list[Tensor]] | None = None  # one of these, and its views
        self._restore([state[i] for i in order])

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.compute, device=self.device)

    def _start(self, value: float | Sequence[float], units: int) -> Tensor:
        one = torch.tensor(value, dtype=STATISTICS).to(self.device)
        return one.expand(units, *one.shape).clone()

    def keep(self, name: str, where: Tensor, value: Tensor) -> Tensor:
        """Set a statistic of the units in `where`; the statistic of all."""
        old = self.statistics[name]
        return torch.where(where if old.dim() == 1 else where.unsqueeze(1), value, old, out=old)

    def _restore(self, state: Sequence[dict[str, Any]]) -> None:
        """Take over what the state holds, then make the state views of this bucket."""
        for name, parameter, own, known in zip(self.names, self.params, self.views(), state, strict=True):
            missing = sorted(own.keys() - known.keys() - {AVERAGE, HELD, ENLARGED})
            if "step" in known and missing:
                raise ValueError(
                    f"the state of '{name}' has no '{missing[0]}': it was saved by another optimizer or under another "
                    "rule. Make this one with the same class and rule, or start without that state."
                )
            for key, view in own.items():
                full = sharded.whole(view, parameter) if key in self.buffers else view
                if key in known:
                    value = known[key] if isinstance(known[key], Tensor) else view.new_tensor(known[key])
                    if value.shape != full.shape:
                        raise ValueError(
                            f"the state of '{name}' has '{key}' of shape {tuple(value.shape)}, and the parameter "
                            f"wants {tuple(full.shape)}: it was saved for another model."
                        )
                    view.copy_(sharded.share(value, parameter) if key in self.buffers else value)
                elif key == AVERAGE:
                    view.copy_(sharded.local(parameter.detach()))
                known[key] = full

    def views(self) -> Iterable[dict[str, Tensor]]:
        """What the state of each parameter is made of."""
        matrices = {name: self.tensors(buffer) for name, buffer in self.buffers.items()}
        for number, unit in enumerate(self.units):
            yield {
                **{name: tensors[number] for name, tensors in matrices.items()},
                "step": self.steps[number],
                **{name: values[unit] for name, values in self.statistics.items()},
            }

    def fits(self) -> bool:
        """Whether the parameters are still where they were when the bucket was made."""
        return self._layouts() == self.layouts

    def _layouts(self) -> list[tuple[Any, ...]]:
        """All that this layout goes by."""
        return [(p.device, p.dtype, p.shape, p.stride()) for p in self.params]

    # Between tensors and rows.

    def here(self, tensors: Sequence[Any]) -> list[Any]:
        """What of tensors like the parameters lies on this rank: all, unless they are sharded."""
        if self.group is None:
            return list(tensors)
        return [None if tensor is None else sharded.local(tensor) for tensor in tensors]

    def rows(self, tensors: Iterable[Tensor | None], name: str) -> Tensor:
        """Tensors in the order of `params` as one (rows, ROW) matrix, the scratch of that name; None is zeros."""
        flat: list[Tensor] = []
        for tensor, absent, order, pad in zip(tensors, self.absent, self.orders, self.pads, strict=True):
            here = absent if tensor is None else tensor if order is None else tensor.permute(order)
            flat += [here if here.dim() == 1 else here.reshape(-1), *pad]
        matrix = self.scratch(name)
        torch.cat(flat, out=matrix.view(-1))
        return matrix

    def scratch(self, name: str) -> Tensor:
        """A (rows, ROW) matrix to write to, for the rest of the step or until its name is asked for again.

        On a CPU each name has one that is kept: a large one that is new has to be given its pages by the system, which
        takes several times what is then done with it. A GPU's allocator keeps them. In a compiled step each is new: one
        that outlives the step would have to be written.
        """
        if not self._keeps():
            return torch.empty(self.shape, dtype=self.compute, device=self.device)
        if name not in self._scratch:
            with torch.inference_mode(False):  # else no step outside of that mode could write to it later
                self._scratch[name] = torch.empty(self.shape, dtype=self.compute)
        return self._scratch[name]

    def _keeps(self) -> bool:
        return self.device.type == "cpu" and not torch.compiler.is_compiling()

    def tensors(self, matrix: Tensor) -> list[Tensor]:
        """The views of a (rows, ROW) matrix that have the shapes of the parameters."""
        return [matrix.as_strided(*place) for place in self.places]

    def scratch_tensors(self, matrix: Tensor) -> list[Tensor]:
        """Those of a scratch matrix, which are kept where it is, as every step asks for the same."""
        if not self._keeps():
            return self.tensors(matrix)
        if self._viewed is None or self._viewed[0] is not matrix:
            with torch.inference_mode(False):
                self._viewed = matrix, self.tensors(matrix)
        return self._viewed[1]

    # Between rows and units.

    def sums(self, *of_rows: Tensor) -> Tensor:
        """Sums over rows to sums over units, on whichever rank the rows of a unit are: (sums, units)."""
        sums = self.sums_here(of_rows)
        return sums if self.group is None else total(sums, self.group)

    def sums_here(self, of_rows: Sequence[Tensor]) -> Tensor:
        """The same over the rows that lie on this rank."""
        if len(of_rows) == 1:
            return self.sum_runs(of_rows[0].to(STATISTICS)).unsqueeze(0)
        return self.sum_runs(torch.stack(list(of_rows), 1).to(STATISTICS)).T

    def squares(self, *matrices: Tensor) -> Tensor:
        """Σ x² over each unit, of several (rows, ROW) matrices: (matrices, units)."""
        norms = torch.stack([torch.linalg.vector_norm(matrix, dim=1) for matrix in matrices], 1)
        sums = self.sum_runs(norms.to(STATISTICS).square_()).T
        return sums if self.group is None else total(sums, self.group)

    def sum_runs(self, sums: Tensor, level: int = 0) -> Tensor:
        """The sums over each row, or at a higher level over runs of them, to those over each unit: (units, ...)."""
        for offsets in self.runs[level:]:
            sums = torch.segment_reduce(sums, "sum", offsets=offsets, unsafe=True)
        return sums

    def sum(self, of_rows: Tensor) -> Tensor:
        """A sum over rows to that over units, (units,)."""
        return self.sums(of_rows)[0]

    def stack(self, numbers: Sequence[Tensor | None]) -> Tensor:
        """One number per tensor (None is zero), stacked."""
        return torch.stack([self.zero if number is None else number for number in numbers])

    def numbers(self, numbers: Sequence[Tensor | int]) -> Tensor:
        """One number per tensor, of the host or of the device, stacked. The host's are as a rule the same for all."""
        first = numbers[0]
        if isinstance(first, int) and all(isinstance(n, int) and n == first for n in numbers):
            return torch.full_like(self.steps, first)
        full = functools.partial(torch.full, (), dtype=self.compute, device=self.device)
        return self.stack([full(number) if isinstance(number, int) else number for number in numbers]).to(STATISTICS)

    def reduce(self, numbers: Tensor, how: str) -> Tensor:
        """One number per tensor to one per unit."""
        if self.single:
            return numbers
        return torch.segment_reduce(numbers, how, lengths=self.tensors_per_unit, unsafe=True)

    def of_tensors(self, units: Tensor) -> Tensor:
        """One number per unit, for each tensor."""
        return units if self.single else units[self.unit_of_tensor]

    def spread(self, units: Tensor) -> Tensor:
        """One number per unit, as a column that broadcasts over the rows."""
        return units.to(self.compute)[self.unit_column]

    def column(self, tensors: Tensor) -> Tensor:
        """One number per tensor, as a column that broadcasts over the rows."""
        return tensors[self.tensor_column].to(self.compute)

    def present(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Which tensors are there, on the device; None where all are. Few patterns occur, so each is made once."""
        pattern = tuple(tensor is not None for tensor in tensors)
        if all(pattern):
            return None
        if pattern not in self._present:
            if len(self._present) == PATTERNS:
                self._present.clear()
            self._present[pattern] = torch.tensor(pattern).to(self.device)
        return self._present[pattern]


def _runs(lengths: list[int]) -> list[list[int]]:
    """How many rows to sum up, and how many of those sums, ..., until there is one for each unit.

    A GPU sums up each run by one thread, so that none may be long.
    """
    runs = []
    while max(lengths) > RUN:
        pieces = [[RUN] * (length // RUN) + ([length % RUN] if length % RUN else []) for length in lengths]
        runs.append([piece for some in pieces for piece in some])
        lengths = [len(some) for some in pieces]
    return [*runs, lengths]


def _order(tensor: Tensor) -> list[int] | None:
    """The axes of a tensor from the outermost to the innermost in memory; None: as they are, or there are gaps."""
    order = sorted(range(tensor.dim()), key=lambda axis: (tensor.stride(axis), tensor.shape[axis]), reverse=True)
    dense = tensor.stride() == _strides(tensor.shape, order)
    return order if dense and not tensor.is_contiguous() else None


def _strides(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Those of a tensor without gaps, whose axes lie in that order."""
    strides, size = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        strides[axis], size = size, size * shape[axis]
    return tuple(strides)


def bits_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A column of True and False as all bits or none of a number of that dtype."""
    return -rows.to(torch.int64 if dtype == torch.float64 else torch.int32)


def mask_(matrix: Tensor, bits: Tensor) -> Tensor:
    """Put zeros in the rows that have no `bits`, whatever was there: 0 · inf is no number, its bits are.

    For a million elements on a CPU this takes a fifth of the time of `torch.where`.
    """
    matrix.view(bits.dtype).bitwise_and_(bits)
    return matrix


def row_squares(matrix: Tensor) -> Tensor:
    """The sum of squares of each row, without a matrix of them."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.to(STATISTICS).square()
