"""The step on a GPU in two kernels over the elements, where the metric and the rule are ones that `kernels` knows.

All the others, and every CPU, take the operations in `step`. Both go by the same rule, on the same sums. A compiler
fuses by itself, and traces the plain path.
"""

import importlib.util
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoopt.optim.bucket import AVERAGE, ROW, Bucket
from autoopt.oracle import relative

ENABLED = os.environ.get("AUTOOPT_FUSED") != "0" and importlib.util.find_spec("triton") is not None
SUMS = 8  # how many there are, below
_broken: list[str] = []  # why the kernels cannot be built here
_built: list[bool] = []  # whether they have been


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


def available(device: torch.device) -> bool:
    """Whether the kernels run there."""
    return ENABLED and device.type == "cuda" and not _broken


def suits(group: dict[str, Any], bucket: Bucket) -> bool:
    """Whether the kernels may do the step of a bucket whose metric they know."""
    return (
        group["rule"] == "robust"
        and bucket.dtype == torch.float32
        and bucket.ordinary
        and not torch.compiler.is_compiling()
        and available(bucket.device)
    )


def sweep(
    bucket: Bucket,
    group: dict[str, Any],
    form: Form,
    gradients: Sequence[Tensor | None],
    squares: Sequence[Tensor | None] | None,
    factors: Tensor | None,
) -> "Sweep | None":
    """The first kernel; None where kernels cannot be built, as without a C compiler. It writes nothing that is kept."""
    try:
        return Sweep(bucket, group, form, gradients, squares, factors)
    except Exception as error:
        if _built or recording(bucket.device):
            raise
        _broken.append(str(error))
        warnings.warn(
            f"AutoOpt's kernels could not be built ({type(error).__name__}: {error}), so that the step takes longer. "
            "Triton needs a C compiler; AUTOOPT_FUSED=0 does without and says nothing.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


class Sweep:
    """One step of one bucket: what both kernels read, and the sums that lie between them.

    Args:
        bucket: the parameters.
        group: its options.
        form: the metric.
        gradients: of each parameter; None: it has none.
        squares: Σ_i c_i² of every element, where that is measured and the metric weighs it.
        factors: what the gradients were multiplied by since, and these squares were not.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: dict[str, Any],
        form: Form,
        gradients: Sequence[Tensor | None],
        squares: Sequence[Tensor | None] | None,
        factors: Tensor | None,
    ) -> None:
        from autoopt.optim import kernels

        self.bucket, self.group, self.form = bucket, group, form
        self.present = bucket.present(gradients)
        self.weights = Operand(bucket, "weights", bucket.params)
        self.gradient = Operand(bucket, "gradient", gradients)
        square = None if squares is None else Operand(bucket, "square", squares)
        self.corrections = self._corrections()

        decay = group["weight_decay"]
        self.coupled = bool(decay) and not group["decoupled_weight_decay"]
        self.second = bucket.buffers["estimate" if form.buffer is None else form.buffer]
        self.shared = {
            "METRIC": _metric(form),
            "COUPLED": self.coupled,
            "ALIGNED": all(operand.aligned for operand in (self.weights, self.gradient, square) if operand),
            "TILE": kernels.TILE,
            "WIDTH": ROW,
            "num_warps": kernels.WARPS,
        }
        share = 0.0 if form.decay is None else 1 - form.decay
        self.numbers = (relative.MOMENTUM, 1 - relative.MOMENTUM, share, form.eps, float(decay))

        estimate, runs = bucket.buffers["estimate"], len(bucket.runs[0]) - 1
        out = torch.empty(runs, SUMS, dtype=torch.float64, device=bucket.device)
        with torch.cuda.device_of(estimate):
            kernels.sums[(runs,)](
                self.gradient.table, self.gradient.table if square is None else square.table, estimate, self.second,
                self.weights.table, out, bucket.runs[0], bucket.tensor_of_row, bucket.first_rows,
                bucket.sizes, out if self.present is None else self.present.view(torch.uint8),
                self.corrections, out if factors is None else factors,
                *self.numbers, MEASURES=square is not None, FACTORS=factors is not None,
                PRESENT=self.present is not None, **self.shared,
            )  # fmt: skip
        _built[:] = [True]
        self.sums = Sums(*bucket.sum_runs(out, 1))

    def _corrections(self) -> Tensor:
        """1 - decay^t for each tensor, t with this step where it has a gradient."""
        steps, decay = self.bucket.steps, self.form.decay
        if decay is None:
            return steps
        steps = steps + 1 if self.present is None else (steps + self.present).clamp_min(1)
        corrections: Tensor = 1 - decay**steps
        return corrections

    def apply(self, moves: Tensor, scale: Tensor, shrink: Tensor | None, newest: Tensor | None) -> None:
        """The second kernel.

        Args:
            moves: which tensors.
            scale: what to multiply the direction by, for each unit, besides `lr`.
            shrink: which share of `weight_decay`, besides `lr`, shrinks the weights, if it is decoupled.
            newest: the share of the new weights in their average, if one is kept.
        """
        from autoopt.optim import kernels

        bucket, buffers = self.bucket, self.bucket.buffers
        estimate = buffers["estimate"]
        rows = len(estimate)
        with torch.cuda.device_of(estimate):
            kernels.update[(-(-rows // kernels.TILE),)](
                self.gradient.table, estimate, self.second, self.weights.table, buffers.get(AVERAGE, estimate), rows,
                bucket.tensor_of_row, bucket.unit_of_row, bucket.first_rows, bucket.sizes,
                moves.view(torch.uint8), scale, scale if shrink is None else shrink,
                scale if newest is None else newest, self.corrections, *self.numbers, float(self.group["lr"]),
                DECOUPLED=shrink is not None, AVERAGES=newest is not None, **self.shared,
            )  # fmt: skip
        self.weights.put_back()
        torch.autograd.graph.increment_version([*bucket.params, *buffers.values()])


class Operand:
    """Tensors like the parameters, for a kernel to find by a table of their addresses, kept while these stay the same.

    A CUDA graph must not depend on what the host will hold. While one is recorded, tensors whose addresses the device
    does not know are put together as rows, whose addresses follow from that of the first.

    Args:
        bucket: the parameters.
        name: of the table.
        tensors: in the order of the parameters; None: not there.
    """

    def __init__(self, bucket: Bucket, name: str, tensors: Sequence[Tensor | None]) -> None:
        self.tensors = tensors
        self.flat = [tensor if tensor is None or _plain(tensor) else tensor.float().contiguous() for tensor in tensors]
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in self.flat)
        self.aligned = not any(address % 16 for address in addresses)
        known, self.table = bucket.tables.get(name, (None, bucket.first_rows))
        lasting = tensors is bucket.params and all(
            flat is tensor for flat, tensor in zip(self.flat, tensors, strict=True)
        )
        if recording(bucket.device) and not (lasting and known == addresses):  # a gradient does not outlive the step
            rows = bucket.rows(tensors)
            self.flat, self.aligned = list(bucket.tensors(rows)), True
            self.table = bucket.first_rows * (ROW * rows.element_size()) + rows.data_ptr()
        elif known != addresses:
            self.table = _uploaded(addresses, bucket.device)
            bucket.tables[name] = addresses, self.table

    def put_back(self) -> None:
        """Have what a kernel wrote in the tensors themselves, where it wrote to copies."""
        pairs = [(to, copy) for to, copy in zip(self.tensors, self.flat, strict=True) if copy is not to]
        if pairs:
            to, copies = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(to, copies)


def recording(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _plain(tensor: Tensor) -> bool:
    """Whether the elements lie one after the other, in the kernels' precision."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _uploaded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A table on the device, without waiting for it."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _metric(form: Form) -> int:
    """The kernels' number for it."""
    if form.buffer is None:
        return 0
    return 2 if form.decay is None else 1
