"""The step on a GPU in three kernels, where the metric and the rule are ones that `kernels` knows.

All the others, and every CPU, take the operations in `step`. Both go by the same rule, on the same sums. A compiler
fuses by itself, and traces the plain path.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoopt.capture.aside import recording
from autoopt.moments.building import available, built, pinned, uploaded
from autoopt.moments.operation import alike
from autoopt.optim.bucket import AVERAGE, ENLARGED, HELD, ROW, STATISTICS, Bucket

SUMS = 8  # how many there are, below
TOTAL: tuple[Any, tuple[int, ...], int] = torch.Size(), (), 0  # how one number lies in memory
UNITS = 4096  # that one program decides on; for more the operations do


class Form(NamedTuple):
    """A metric that the kernels know: the identity, or √(s/c) + eps, s an average or a sum of squared gradients."""

    buffer: str | None = None  # that holds s; None: the identity
    decay: float | None = None  # of the average, and then c = 1 - decay^t; None: a sum, and c = 1
    eps: float = 0.0


class Sums(NamedTuple):
    """What the first kernel sums up for each unit; m = ĝ of the step before, d = ĝ/ĥ of this one, if the unit moves."""

    size: Tensor  # Σ g²
    gm: Tensor  # <g, m>
    gg: Tensor  # <g, g>, with weight decay
    raw_gg: Tensor  # without it
    spread: Tensor  # Σ Σ_i c_i²
    square: Tensor  # Σ_i <c_i, c_i>
    direction: Tensor  # |d|²
    weights: Tensor  # |w|²


class Decision(NamedTuple):
    """What the last kernel goes by."""

    moves: Tensor  # which tensors
    scale: Tensor  # what to multiply the direction by, for each unit, besides `lr`
    shrink: Tensor  # which share of `weight_decay`, besides `lr`, shrinks the weights, if it is decoupled
    newest: Tensor  # the share of the new weights in their average; then the smallest, or 0 if something is not finite
    momentum: Tensor  # β of this step, for each unit


def suits(group: dict[str, Any], bucket: Bucket) -> bool:
    """Whether the kernels may do the step of a bucket whose metric they know."""
    return (
        group["rule"] == "robust"
        and bucket.dtype == torch.float32
        and bucket.ordinary
        and not torch.compiler.is_compiling()
        and bucket.buildable
        and available(bucket.device)
    )


def sweep(
    bucket: Bucket,
    group: dict[str, Any],
    form: Form,
    gradients: Sequence[Tensor | None],
    squares: Sequence[Tensor | None] | None,
    sizes: Tensor | None,
    *,
    elementwise: bool,
) -> "Sweep | None":
    """The first kernel; None where it cannot be built, as without a C compiler. It writes nothing that is kept."""
    found = built("sums", lambda: Sweep(bucket, group, form, gradients, squares, sizes, elementwise))
    bucket.buildable = found is not None
    return found


class Sweep:
    """One step of one bucket: what the kernels read, and the sums that lie between them.

    Args:
        bucket: the parameters.
        group: its options.
        form: the metric.
        gradients: of each parameter; None: it has none.
        squares: Σ_i c_i² of each parameter; None: this step measures none.
        sizes: what tells the factors that the gradients were multiplied by since, and these squares were not.
        elementwise: the squares are of every element, and not the sum over these.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: dict[str, Any],
        form: Form,
        gradients: Sequence[Tensor | None],
        squares: Sequence[Tensor | None] | None,
        sizes: Tensor | None,
        elementwise: bool,
    ) -> None:
        from autoopt.optim import kernels

        self.bucket, self.group = bucket, group
        self.present = bucket.present(gradients)
        self.weights = Operand(bucket, "weights", bucket.params)
        self.gradient = Operand(bucket, "gradient", gradients)
        square = None if squares is None else Operand(bucket, "square", squares, totals=not elementwise)
        self.powers = bucket.steps if form.decay is None else form.decay**bucket.steps

        decay = group["weight_decay"]
        self.coupled = bool(decay) and not group["decoupled_weight_decay"]
        self.second = bucket.buffers["estimate" if form.buffer is None else form.buffer]
        metric = _metric(form)
        self.shared = {
            "METRIC": metric,
            "COUPLED": self.coupled,
            "ALIGNED": all(
                operand.aligned for operand in (self.weights, self.gradient, square if elementwise else None) if operand
            ),
            "TILE": kernels.TILE[metric],
            "WIDTH": ROW,
            "num_warps": kernels.WARPS,
        }
        share = 0.0 if form.decay is None else 1 - form.decay
        self.numbers = (share, form.eps, float(decay))

        estimate, runs, known = bucket.buffers["estimate"], len(bucket.runs[0]) - 1, bucket.statistics
        out = torch.empty(runs, SUMS, dtype=STATISTICS, device=bucket.device)
        spread = self.gradient if square is None else square
        with torch.cuda.device_of(estimate):
            kernels.sums[(runs,)](
                self.gradient.table, spread.table, estimate, self.second,
                self.weights.table, out, bucket.runs[0], bucket.tensor_of_row, bucket.unit_of_row, bucket.first_rows,
                bucket.sizes, out if self.present is None else self.present.view(torch.uint8),
                self.powers, out if sizes is None else sizes, known["count"], known["age"],
                *self.numbers, MEASURES=0 if square is None else 2 if elementwise else 1, CHANGED=sizes is not None,
                PRESENT=self.present is not None, **self.shared,
            )  # fmt: skip
        self.matrix = bucket.sum_runs(out, 1)  # (units, sums)

    @functools.cached_property
    def sums(self) -> Sums:
        """Each for all units."""
        return Sums(*self.matrix.unbind(1))

    def decide(self, samples: Tensor | int | None, total: Tensor | None) -> Decision:
        """The second kernel, which changes the statistics and says what to do.

        Args:
            samples: N, of each unit or of all; None: this step measures none.
            total: finite where all is that must be; None: it must be here alone.
        """
        from autoopt.optim import kernels

        bucket, known, matrix = self.bucket, self.bucket.statistics, self.matrix
        units, tensors = len(matrix), len(bucket.params)
        block = min(1 << (tensors - 1).bit_length(), UNITS)
        moves = torch.empty(tensors, dtype=torch.uint8, device=bucket.device)
        room = (units | 1) + 1  # one more, and even: Triton compiles anew for what does not begin on 16 bytes
        scale, shrink, newest, momentum = torch.empty(4, room, dtype=STATISTICS, device=bucket.device).unbind()
        with torch.cuda.device_of(matrix):
            kernels.decide[(1,)](
                matrix, float(samples) if isinstance(samples, int) else matrix if samples is None else samples,
                matrix if total is None else total,
                moves if self.present is None else self.present.view(torch.uint8),
                bucket.unit_of_tensor, bucket.elements, known[ENLARGED], bucket.steps,
                known["count"], known["noise"], known.get(HELD, matrix), known["carry"], known["age"], known["start"],
                known["size"], known["gradient"], known["variance"], known["measured"], known["alignment"],
                known["usual"], known["rate"], moves, scale, shrink, newest, momentum, units,
                MEASURES=samples is not None, COUNTED=isinstance(samples, Tensor), HOLDS=HELD in known,
                ALONE=total is None, PRESENT=self.present is not None, TENSORS=tensors, BLOCK=block,
                num_warps=min(max(block // 32, 1), 16),
            )  # fmt: skip
        torch.autograd.graph.increment_version([*known.values(), bucket.steps])
        return Decision(moves, scale, shrink, newest, momentum)

    def apply(self, decision: Decision) -> None:
        """The last kernel."""
        from autoopt.optim import kernels

        self.slowest = decision.newest[len(self.matrix)]
        bucket, buffers = self.bucket, self.bucket.buffers
        estimate = buffers["estimate"]
        rows = len(estimate)
        with torch.cuda.device_of(estimate):
            kernels.update[(-(-rows // self.shared["TILE"]),)](
                self.gradient.table, estimate, self.second, self.weights.table, buffers.get(AVERAGE, estimate), rows,
                bucket.tensor_of_row, bucket.unit_of_row, bucket.first_rows, bucket.sizes,
                *decision, self.powers, *self.numbers, float(self.group["lr"]),
                DECOUPLED=bool(self.group["weight_decay"]) and not self.coupled, AVERAGES=AVERAGE in buffers,
                **self.shared,
            )  # fmt: skip
        self.weights.put_back()
        torch.autograd.graph.increment_version([*bucket.params, *buffers.values()])


class Operand:
    """Tensors like the parameters, for a kernel to find by a table of their addresses, kept while these stay the same.

    A CUDA graph finds its tensors at the same addresses whenever it runs, but copies the table from the host every
    time: it gets one of its own, of which both ends were there before, as nothing can be allocated for the host while
    a graph is recorded. Without such a spare one (it is the second graph since a step) the tensors are put together,
    so that their addresses follow from that of the first.

    Args:
        bucket: the parameters.
        name: of the table.
        tensors: in the order of the parameters; None: not there.
        totals: they are one number for each of these.
    """

    def __init__(self, bucket: Bucket, name: str, tensors: Sequence[Tensor | None], *, totals: bool = False) -> None:
        self.tensors = tensors
        places = [TOTAL] * len(tensors) if totals else bucket.places
        self.flat = [
            tensor
            if tensor is not None and tensor.dtype == torch.float32 and tensor.stride() == place[1]  # as a rule
            else _in_place(tensor, place)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self.flat]
        known, self.table, self.aligned = bucket.tables.get(name, ([], bucket.first_rows, True))
        same = known == addresses
        if not recording(bucket.device):
            if not same:
                self.table, self.aligned = uploaded(addresses, bucket.device), _aligned(addresses)
                bucket.tables[name] = addresses, self.table, self.aligned
            if name not in bucket.spares:
                bucket.spares[name] = pinned(addresses, bucket.device), torch.empty_like(self.table)
        elif not (same and self._lasts(bucket)):
            if name in bucket.spares:
                host, self.table = spare = bucket.spares.pop(name)
                bucket.recorded.append(spare)
                self.table.copy_(host.copy_(torch.tensor(addresses)), non_blocking=True)
                self.aligned = _aligned(addresses)
            elif totals:
                whole = bucket.stack(self.flat)
                self.flat = list(whole.unbind())
                self.table = torch.arange(len(whole), device=bucket.device) * whole.element_size() + whole.data_ptr()
            else:
                whole = bucket.rows(tensors, name)
                self.flat, self.aligned = list(bucket.tensors(whole)), True
                self.table = bucket.first_rows * (ROW * whole.element_size()) + whole.data_ptr()

    def _lasts(self, bucket: Bucket) -> bool:
        """Whether the tensors outlive the step: a gradient does not, nor does a copy."""
        return self.tensors is bucket.params and all(map(operator.is_, self.flat, self.tensors))

    def put_back(self) -> None:
        """Have what a kernel wrote in the tensors themselves, where it wrote to copies."""
        pairs = [(to, copy) for to, copy in zip(self.tensors, self.flat, strict=True) if copy is not to]
        if pairs:
            to, copies = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(to, copies)


def _in_place(tensor: Tensor | None, place: tuple[Any, tuple[int, ...], int]) -> Tensor | None:
    """The tensor, or a copy of it, in the kernels' precision and with its elements in the order of those in a row."""
    if tensor is None:
        return None
    shape, strides, _ = place
    if tensor.dtype == torch.float32 and alike(tensor, strides):
        return tensor
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=tensor.device).copy_(tensor)


def _aligned(addresses: Sequence[int]) -> bool:
    """Whether four elements are one access, at all of them."""
    return not any(address % 16 for address in addresses)


def _metric(form: Form) -> int:
    """The kernels' number for it."""
    if form.buffer is None:
        return 0
    return 2 if form.decay is None else 1
