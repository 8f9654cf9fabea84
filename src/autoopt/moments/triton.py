# mypy: ignore-errors
# (Triton's kernel language is not typed Python.)
"""GPU kernels for half precision: what a rule computes in several passes over memory, in one.

`weight_moments` is a weight gradient with one change: a program keeps its tile of the matrix in registers while it goes
through its samples, and adds to the sum not single products but, sample after sample, the finished c_i and its square.
The extra work is two additions per element and sample, against `positions` multiplications. Windows of a convolution
are read where they lie in the image. `reduce` takes c_i that are in memory, and `position_sums` serves normalisations.

Every number is summed in one fixed order, so two runs agree to the last bit. The twins in plain PyTorch are
`product.product_moments` (with `Conv.columns`), `operation.moments` and `norm`. Imported only where `fused` says so.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoopt.moments.operation import Moments

# What `_splits` weighs: the rates of a large GPU, of which only the proportions matter.
MULTIPLY, MEMORY, BETWEEN = (
    2e12,
    4e12,
    64,
)  # products/s of a processor, bytes/s of all; a change of sample, in positions


@triton.jit
def _weight_moments(
    dy, x, gradient, square, samples, per_split, outputs, inputs, height, width, out_width, positions,
    dy_sample, dy_row, dy_column, dy_output, x_sample, x_row, x_column, x_input,
    split_step, gradient_tap, gradient_input, square_tap, square_input,
    KERNEL_W: tl.constexpr, TAPS: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    SEQUENCE: tl.constexpr, SHORT: tl.constexpr, TOTAL: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One tile (outputs x inputs of one tap) of Σ c_i and Σ c_i² over one share of the samples."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tap = tile % TAPS
    o_tiles = tl.cdiv(outputs, BLOCK_O)
    o = (tile // TAPS) % o_tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tile // (TAPS * o_tiles) * BLOCK_I + tl.arange(0, BLOCK_I)
    first_row = tap // KERNEL_W * DILATION_H - PAD_H
    first_column = tap % KERNEL_W * DILATION_W - PAD_W
    precision: tl.constexpr = "ieee" if IEEE else "tf32"

    g = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    s = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    first = split * per_split
    blocks = 1 if SHORT else tl.cdiv(positions, BLOCK_T)
    c = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    # One loop over samples and positions, so that the next sample's data are on their way while this one's are used.
    for step in range(first * blocks, tl.minimum(first + per_split, samples) * blocks):
        n = tl.cast(step // blocks, tl.int64)
        t = step % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
        if SEQUENCE:
            seen = t < positions
            d_at, a_at = t * dy_column, t * x_column
        else:
            row, column = t // out_width, t % out_width
            d_at = row * dy_row + column * dy_column
            row, column = row * STRIDE_H + first_row, column * STRIDE_W + first_column
            seen = (t < positions) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            a_at = row * x_row + column * x_column
        d_mask = (o < outputs)[:, None] & (t < positions)[None, :]
        d = tl.load(dy + n * dy_sample + d_at[None, :] + o[:, None] * dy_output, mask=d_mask, other=0.0)
        a_mask = seen[:, None] & (i < inputs)[None, :]
        a = tl.load(x + n * x_sample + a_at[:, None] + i[None, :] * x_input, mask=a_mask, other=0.0)
        c = tl.dot(d, a, c, input_precision=precision)
        if SHORT or step % blocks == blocks - 1:  # the sample is complete
            g += c
            s += c * c
            c = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)

    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    place = o[:, None] * (inputs * TAPS)
    g_at = split.to(tl.int64) * split_step + place + i[None, :] * gradient_input + tap * gradient_tap
    tl.store(gradient + g_at, g, mask=inside)
    if TOTAL:
        tl.store(square + split * tl.num_programs(0) + tile, tl.sum(s))
    else:
        s_at = split.to(tl.int64) * split_step + place + i[None, :] * square_input + tap * square_tap
        tl.store(square + s_at, s, mask=inside)


@triton.jit
def _position_sums(
    dy, x, mean, rstd, out, channels, positions, per_split,
    dy_sample, dy_position, dy_channel, x_sample, x_position, x_channel, m_sample, m_position, m_group,
    PER_GROUP: tl.constexpr, CENTRED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Σ_t δ x̂ of some channels of one sample, over one share of the positions."""
    n, split = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    dy_n, x_n = dy + n.to(tl.int64) * dy_sample, x + n.to(tl.int64) * x_sample
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    first = split * per_split
    for start in range(first, tl.minimum(first + per_split, positions), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = (t < positions)[:, None] & (c < channels)[None, :]
        d = tl.load(dy_n + t[:, None] * dy_position + c[None, :] * dy_channel, mask=inside, other=0.0)
        a = tl.load(x_n + t[:, None] * x_position + c[None, :] * x_channel, mask=inside, other=0.0)
        at = n * m_sample + t[:, None] * m_position + (c // PER_GROUP)[None, :] * m_group
        a = a.to(tl.float32)
        if CENTRED:
            a -= tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
        sums += d.to(tl.float32) * a * tl.load(rstd + at, mask=inside, other=0.0).to(tl.float32)
    place = (split * tl.num_programs(0) + n).to(tl.int64) * channels + c
    tl.store(out + place, tl.sum(sums, 0), mask=c < channels)


@triton.jit
def _reduce(c, gradient, square, samples, size, TOTAL: tl.constexpr, BLOCK: tl.constexpr):
    """Σ_i c_i and Σ_i c_i² of some elements, in one reading."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.zeros((BLOCK,), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    for _ in range(samples):
        part = tl.load(c + at, mask=at < size, other=0.0).to(tl.float32)
        g += part
        s += part * part
        c += size
    tl.store(gradient + at, g.to(gradient.dtype.element_ty), mask=at < size)
    if TOTAL:
        tl.store(square + tl.program_id(0), tl.sum(s))
    else:
        tl.store(square + at, s, mask=at < size)


Sizes = tuple[int, ...]  # of rows and columns


def weight_moments(
    dy: Tensor, x: Tensor, total: bool, kernel: Sizes = (1, 1), stride: Sizes = (1, 1), padding: Sizes = (0, 0),
    dilation: Sizes = (1, 1), block: Sizes | None = None,
) -> Moments:  # fmt: skip
    """The moments of a weight (out, in, *kernel) from dy (samples, out, rows, columns) and x, of any strides.

    `block` is (outputs, inputs, positions, warps, stages); by default `tile` chooses.
    """
    if torch.compiler.is_compiling():
        return Moments(*_weight_moments_node(dy, x, total, kernel, stride, padding, dilation))
    samples, outputs, out_height, out_width = dy.shape
    inputs, height, width = x.shape[1:]
    positions, taps = out_height * out_width, kernel[0] * kernel[1]
    sequence = taps == 1 and out_height == height == 1 and stride == (1, 1) and padding == (0, 0)
    block = block or tile(outputs, inputs, positions)
    tiles = taps * triton.cdiv(outputs, block[0]) * triton.cdiv(inputs, block[1])
    splits, per_split = _splits(samples, positions, outputs * inputs * taps, tiles, block, dy.device)

    sums = dy.new_empty(splits, 1 if total else 2, outputs * inputs * taps, dtype=torch.float32)
    square = dy.new_empty(splits * tiles, dtype=torch.float32) if total else sums[:, 1]
    last = _channels_last(x, taps)
    _weight_moments[tiles, splits](
        dy, x, sums, square, samples, per_split, outputs, inputs, height, width, out_width, positions,
        dy.stride(0), dy.stride(2), dy.stride(3), dy.stride(1), x.stride(0), x.stride(2), x.stride(3), x.stride(1),
        sums.stride(0), *((inputs, 1) if last else (1, taps)), 1, taps,
        KERNEL_W=kernel[1], TAPS=taps, STRIDE_H=stride[0], STRIDE_W=stride[1], PAD_H=padding[0], PAD_W=padding[1],
        DILATION_H=dilation[0], DILATION_W=dilation[1],
        SEQUENCE=sequence, SHORT=positions <= block[2], TOTAL=total, IEEE=dy.dtype == torch.float32,
        BLOCK_O=block[0], BLOCK_I=block[1], BLOCK_T=block[2], num_warps=block[3], num_stages=block[4],
    )  # fmt: skip
    sums = sums.sum(0) if splits > 1 else sums[0]
    shape = (outputs, inputs, *kernel)
    gradient = sums[0].view(outputs, *kernel, inputs).permute(0, 3, 1, 2) if last else sums[0].view(shape)
    return Moments(gradient.to(dy.dtype), square.sum() if total else sums[1].view(shape))


@torch.library.custom_op("autoopt::weight_moments", mutates_args=())
def _weight_moments_node(
    dy: Tensor, x: Tensor, total: bool, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`weight_moments` as one node of a compiled graph."""
    sizes = (tuple(size) for size in (kernel, stride, padding, dilation))
    gradient, square = weight_moments(dy, x, total, *sizes)
    return gradient, square.clone()  # a node's outputs must not share memory


@_weight_moments_node.register_fake
def _(dy, x, total, kernel, stride, padding, dilation):
    shape = (dy.shape[1], x.shape[1], *kernel)
    last = torch.channels_last if _channels_last(x, kernel[0] * kernel[1]) else torch.contiguous_format
    gradient = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=last)
    return gradient, dy.new_empty(() if total else shape, dtype=torch.float32)


def _channels_last(x: Tensor, taps: int) -> bool:
    """Whether the weight's gradient should be channels last: as x is, and so should be the weight."""
    return taps > 1 and x.stride(1) == 1


def position_sums(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, per_group: int, strides: tuple[int, int, int],
    block: Sizes | None = None,
) -> Tensor:  # fmt: skip
    """Σ_t δ x̂ for every sample and channel, in float32, from dy and x (samples, channels, positions) of any strides.

    x̂ = (x - mean) rstd, or x rstd where mean is None. `strides` of mean and rstd are those of (sample, position, group
    of `per_group` channels).
    """
    samples, channels, positions = dy.shape
    block_t, block_c = block or ((16, 64) if dy.stride(1) == 1 else (128, 8))
    shares = samples * triton.cdiv(channels, block_c)
    splits = min(triton.cdiv(positions, block_t), max(1, 4 * processors(dy.device) // shares))
    per_split = triton.cdiv(triton.cdiv(positions, splits), block_t) * block_t
    splits = triton.cdiv(positions, per_split)
    out = dy.new_empty(splits, samples, channels, dtype=torch.float32)
    _position_sums[samples, triton.cdiv(channels, block_c), splits](
        dy, x, rstd if mean is None else mean, rstd, out, channels, positions, per_split,
        dy.stride(0), dy.stride(2), dy.stride(1), x.stride(0), x.stride(2), x.stride(1), *strides,
        PER_GROUP=per_group, CENTRED=mean is not None, BLOCK_T=block_t, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out.sum(0) if splits > 1 else out[0]


def reduce(contributions: Tensor, total: bool, block: Sizes | None = None) -> Moments:
    """The moments of contributions (samples, *shape) that are there one by one and contiguous.

    `block` is (elements, warps).
    """
    samples, *shape = contributions.shape
    size = contributions[0].numel()
    width, warps = block or (1024, 4)
    programs = triton.cdiv(size, width)
    gradient = contributions.new_empty(shape)
    square = contributions.new_empty(programs if total else shape, dtype=torch.float32)
    _reduce[programs,](contributions, gradient, square, samples, size, TOTAL=total, BLOCK=width, num_warps=warps)
    return Moments(gradient, square.sum() if total else square)


def tile(outputs, inputs, positions):
    """Outputs, inputs and positions that a program holds at once, its warps and its stages in flight."""
    block_o, block_i = (min(128, max(16, triton.next_power_of_2(size))) for size in (outputs, inputs))
    block_t = min(64, max(16, triton.next_power_of_2(positions)))
    return block_o, block_i, block_t, 8 if block_o * block_i > 64 * 128 else 4, 3


@functools.lru_cache(maxsize=4096)
def _splits(samples: int, positions: int, size: int, tiles: int, block: Sizes, device: torch.device) -> tuple[int, int]:
    """How many shares the samples go into, and how many are in each: work for all processors, few partial sums."""

    def seconds(shares: int) -> float:
        waves = triton.cdiv(tiles * shares, processors(device) * (8 // block[3]))
        work = triton.cdiv(samples, shares) * (triton.cdiv(positions, block[2]) * block[2] + BETWEEN)
        partial = 16 * size * shares if shares > 1 else 0  # both sums, written and read
        return waves * (8 // block[3]) * work * block[0] * block[1] / MULTIPLY + partial / MEMORY

    per_split = triton.cdiv(samples, min(range(1, min(samples, 128) + 1), key=seconds))
    return triton.cdiv(samples, per_split), per_split


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs of some size the device runs at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
