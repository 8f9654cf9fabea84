# mypy: ignore-errors
# (Triton's kernel language is not typed Python.)
"""GPU kernels for one sample of a layer: Σ_i c_i² estimated by what that one adds, in one launch for weight and bias.

In plain PyTorch (`sampled.Few`, the twin) it is a dozen operations for a layer, of which a GPU has nothing to do and
the host that starts them much. Tensors are read where they lie, whole batches, of which a kernel takes its row.
Every number is summed in one fixed order. Imported only where Triton is.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoopt.moments.building import built
from autoopt.moments.operation import HALF, Operation, Products
from autoopt.moments.triton import processors

WIDTH = 256  # programs that sum up one parameter, where its total is asked for
LONG = 1 << 13  # positions of a sample that one program may go through
FLOAT = 1 << 28  # multiplications in full precision, which tensor cores do not do, that a kernel may take


@triton.jit(do_not_specialize=["weight_at", "bias_at", "row"], do_not_specialize_on_alignment=["weight", "bias"])
def product_of_one(
    left, right, weight, bias, weight_at, bias_at, share, row, outputs, inputs, height, width, out_width, positions,
    left_sample, left_row, left_column, left_output, right_sample, right_row, right_column, right_input,
    weight_output, weight_input, weight_tap,
    KERNEL_W: tl.constexpr, TAPS: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    SEQUENCE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """share · c² of c = Σ_t δ_t a_tᵀ, one tile (outputs x inputs of one tap) after the other, and of the bias, Σ_t δ_t.

    `BIAS`: 1, it is what is summed on the left, 2, on the right; 0, there is none.
    """
    left += tl.cast(row, tl.int64) * left_sample
    right += tl.cast(row, tl.int64) * right_sample
    o_tiles, i_tiles = tl.cdiv(outputs, BLOCK_O), tl.cdiv(inputs, BLOCK_I)
    weights, biases = 0.0, 0.0
    for tile in range(tl.program_id(0), TAPS * o_tiles * i_tiles, tl.num_programs(0)):
        tap = tile % TAPS
        o_tile, i_tile = (tile // TAPS) % o_tiles, tile // (TAPS * o_tiles)
        o, i = o_tile * BLOCK_O + tl.arange(0, BLOCK_O), i_tile * BLOCK_I + tl.arange(0, BLOCK_I)
        first_row = tap // KERNEL_W * DILATION_H - PAD_H
        first_column = tap % KERNEL_W * DILATION_W - PAD_W
        c = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        b = tl.zeros((BLOCK_I if BIAS == 2 else BLOCK_O,), tl.float32)
        for start in range(0, positions, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            if SEQUENCE:
                seen = t < positions
                d_at, a_at = t * left_column, t * right_column
            else:
                y, x = t // out_width, t % out_width
                d_at = y * left_row + x * left_column
                y, x = y * STRIDE_H + first_row, x * STRIDE_W + first_column
                seen = (t < positions) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
                a_at = y * right_row + x * right_column
            d_mask = (o < outputs)[:, None] & (t < positions)[None, :]
            d = tl.load(left + d_at[None, :] + o[:, None] * left_output, mask=d_mask, other=0.0)
            a_mask = seen[:, None] & (i < inputs)[None, :]
            a = tl.load(right + a_at[:, None] + i[None, :] * right_input, mask=a_mask, other=0.0)
            if WEIGHT:
                c = tl.dot(d, a, c, input_precision="ieee")
            if BIAS == 1:
                b += tl.sum(d.to(tl.float32), 1)
            if BIAS == 2:
                b += tl.sum(a.to(tl.float32), 0)
        if WEIGHT:
            s = c * c * share
            if TOTAL:
                weights += tl.sum(s)
            else:
                at = tl.cast(o, tl.int64)[:, None] * weight_output + i[None, :] * weight_input + tap * weight_tap
                tl.store(weight + at, s, mask=(o < outputs)[:, None] & (i < inputs)[None, :])
        if BIAS:
            first = (tap == 0) & ((o_tile == 0) if BIAS == 2 else (i_tile == 0))  # the others find the same
            b = tl.where(first, b, 0.0)  # before it is squared: Triton 3.6 cannot use twice what a loop summed up
            s = b * b * share
            if TOTAL:
                biases += tl.sum(s)
            else:
                place, size = (i, inputs) if BIAS == 2 else (o, outputs)
                tl.store(bias + place, s, mask=first & (place < size))
    if TOTAL:
        if WEIGHT:
            tl.store(weight + weight_at + tl.program_id(0), weights)
        if BIAS:
            tl.store(bias + bias_at + tl.program_id(0), biases)


@triton.jit(
    do_not_specialize=["weight_at", "bias_at", "row"],
    do_not_specialize_on_alignment=["weight", "bias", "mean", "rstd"],
)
def positions_of_one(
    dy, x, mean, rstd, weight, bias, weight_at, bias_at, share, row, channels, positions,
    dy_sample, dy_position, dy_channel, x_sample, x_position, x_channel, m_sample, m_position, m_group,
    PER_GROUP: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """share · c² of c = Σ_t δ_t x̂_t, some channels after the others, and of the bias, Σ_t δ_t."""
    row = tl.cast(row, tl.int64)
    dy += row * dy_sample
    x += row * x_sample
    weights, biases = 0.0, 0.0
    for tile in range(tl.program_id(0), tl.cdiv(channels, BLOCK_C), tl.num_programs(0)):
        c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        scaled = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        plain = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for start in range(0, positions, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            inside = (t < positions)[:, None] & (c < channels)[None, :]
            d = tl.load(dy + t[:, None] * dy_position + c[None, :] * dy_channel, mask=inside, other=0.0).to(tl.float32)
            if WEIGHT:
                a = tl.load(x + t[:, None] * x_position + c[None, :] * x_channel, mask=inside, other=0.0)
                a = a.to(tl.float32)
                at = row * m_sample + t[:, None] * m_position + (c // PER_GROUP)[None, :] * m_group
                if CENTRED:
                    a -= tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
                scaled += d * (a * tl.load(rstd + at, mask=inside, other=0.0).to(tl.float32))
            if BIAS:
                plain += d
        if WEIGHT:
            sums = tl.sum(scaled, 0)
            if TOTAL:
                weights += tl.sum(sums * sums * share)
            else:
                tl.store(weight + c, sums * sums * share, mask=c < channels)
        if BIAS:
            sums = tl.sum(plain, 0)
            if TOTAL:
                biases += tl.sum(sums * sums * share)
            else:
                tl.store(bias + c, sums * sums * share, mask=c < channels)
    if TOTAL:
        if WEIGHT:
            tl.store(weight + weight_at + tl.program_id(0), weights)
        if BIAS:
            tl.store(bias + bias_at + tl.program_id(0), biases)


class Plan:
    """How a kernel serves a use of a layer: all that stays the same from step to step.

    The first time Triton looks at every argument; from then on the kernel that it chose is started as it is, in a
    fraction of that time.
    """

    width = WIDTH

    def __init__(self, kernel: Any, programs: int, order: Sequence[int], numbers: Sequence[Any], warps: int) -> None:
        self.kernel, self.grid, self.numbers, self.warps = kernel, (programs, 1, 1), numbers, warps
        self.pick = operator.itemgetter(*order)  # what the kernel takes, of the tensors of a use
        self.again: Any = None  # starts the kernel that Triton chose; None where an interpreter runs it

    def start(self, tensors: Sequence[Tensor], weight: Tensor, bias: Tensor) -> bool:
        """Have the kernel write to these; False: no kernel can be built here."""
        if self.again is not None:
            addresses = [tensor.data_ptr() for tensor in tensors]  # which Triton does not look up at the driver
            self.again(*self.pick(addresses), weight.data_ptr(), bias.data_ptr(), *self.numbers)
            return True
        arguments = *self.pick(tensors), weight, bias, *self.numbers
        name = self.kernel.__name__
        chosen = built(name, lambda: [self.kernel[self.grid](*arguments, num_warps=self.warps)])
        if chosen is None:
            return False
        if chosen[0] is not None:
            self.again = chosen[0][self.grid]
        return True


def plan(
    operation: Operation,
    tensors: Sequence[Tensor],
    row: int,
    share: float,
    strides: dict[str, tuple[int, ...]],
    rows: Sequence[int] | None,
) -> Plan | None:
    """How to have share · c² of one sample, where a kernel knows the operation and it is a small matter.

    Args:
        operation: that of the layer.
        tensors: the gradient of its output, and what it kept.
        row: the sample's.
        share: what to multiply by.
        strides: role -> those of the parameter, by which c² is to lie in memory.
        rows: of each parameter, that of a table of WIDTH columns which sum up to Σ c²; None: c² is asked for.
    """
    if any(tensor.dtype == torch.float64 or _extent(tensor) >= 1 << 31 for tensor in tensors):
        return None
    form = operation.of_one(tensors[0], tensors[1:])
    if form is None:
        return None
    places = {tensor.data_ptr(): place for place, tensor in enumerate(tensors)}
    order = [places.get(part.data_ptr()) for part in form if isinstance(part, Tensor)]
    if None in order or len(places) < len(tensors):  # a copy will be somewhere else the next time; so will one of two
        return None
    make = _products if isinstance(form, Products) else _positions
    made = make(form, row, strides, rows is not None)
    if made is None:
        return None
    kernel, tiles, numbers, warps = made
    if len(order) == 3:  # no mean
        order.append(order[2])
    at = [0] * len(strides) if rows is None else [each * WIDTH for each in rows]
    return Plan(kernel, tiles if rows is None else min(tiles, WIDTH), order, (at[0], at[-1], share, *numbers), warps)


def _extent(tensor):
    """How far the elements of a sample lie apart, of which kernels count in 32 bits."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))


def _products(form, row, strides, total):
    left, right, kernel, stride, padding, dilation, bias = form
    outputs, rows, columns = left.shape[1:]
    inputs, height, width = right.shape[1:]
    positions, taps = rows * columns, kernel[0] * kernel[1]
    half = left.dtype in HALF
    if positions > LONG or left.dtype != right.dtype or not (half or outputs * inputs * taps * positions <= FLOAT):
        return None
    at = (0, 0, 0)
    if not total and "weight" in strides:
        weight = strides["weight"]
        if len(weight) == 4 and kernel[0] > 1 and weight[2] != kernel[1] * weight[3]:
            return None  # two taps that follow each other do not lie at one distance
        at = (weight[0], weight[1], weight[-1] if len(weight) > 2 else 0)
    block_o, block_i = (min(64, max(16, triton.next_power_of_2(size))) for size in (outputs, inputs))
    if half and taps * (outputs // 128) * (inputs // 128) >= processors(left.device):
        block_o = block_i = 128
    sequence = taps == 1 and rows == height == 1 and stride == (1, 1) and padding == (0, 0)
    numbers = (
        row, outputs, inputs, height, width, columns, positions,
        left.stride(0), left.stride(2), left.stride(3), left.stride(1),
        right.stride(0), right.stride(2), right.stride(3), right.stride(1), *at,
        kernel[1], taps, *stride, *padding, *dilation, sequence, "weight" in strides,
        bias if "bias" in strides else 0, total, block_o, block_i, min(64, max(16, triton.next_power_of_2(positions))),
    )  # fmt: skip
    tiles = taps * triton.cdiv(outputs, block_o) * triton.cdiv(inputs, block_i)
    return product_of_one, tiles, numbers, 8 if block_o * block_i > 64 * 64 else 4


def _positions(form, row, strides, total):
    dy, x, mean, _, per_group, at = form
    channels, positions = dy.shape[1:]
    weight = strides.get("weight", ())
    if positions > LONG or not (total or weight == tuple(sorted(weight, reverse=True))):
        return None
    block_c = 16 if positions > 1 else 64
    block_t = min(128, triton.next_power_of_2(positions))
    numbers = (
        row, channels, positions, dy.stride(0), dy.stride(2), dy.stride(1), x.stride(0), x.stride(2), x.stride(1),
        *at, per_group, mean is not None, "weight" in strides, "bias" in strides, total, block_t, block_c,
    )  # fmt: skip
    return positions_of_one, triton.cdiv(channels, block_c), numbers, 4
