# mypy: ignore-errors
# (Triton's kernel language is not typed Python.)
"""The engine's GPU kernels. Every program works for one run, and its block sizes never depend on the number of runs:
a run's result is the same to the last bit whatever its neighbours are.

A convolution followed by 2 x 2 max pooling is one strided convolution with a larger window: the window of E = S + 1
pixels square under a pooled output holds the patches of its Q = 4 candidates, so with the weight placed in it at Q
offsets (`expand`: columns (q, o), window elements e) all candidates come out of one pass over the window. Without
pooling Q = 1 and the window is the patch; a Linear is a convolution of a 1 x 1 image. Matrix products are implicit:
windows are read where they lie in the image, which is channels last, instead of being copied out first.

`origin` says which candidate an output came from, -1 where its ReLU is off; so the gradient of candidate (q, o) is
`d` times the dropout factor where origin == q and zero elsewhere. It is formed where it is needed and never stored.

A block reaches beyond its matrix by wrapping round to elements of the same run, against weights that are zero, so inner
loops need no masks on images and read nothing that belongs to another run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def expand(w_ptr, out_ptr, w_run,
    C: tl.constexpr, S: tl.constexpr, O: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """The weight at each candidate's place in the window: (K, O, patch) -> (K, Q O, window)."""
    E: tl.constexpr = S + POOL - 1
    SIZE: tl.constexpr = POOL * POOL * O * E * E * C
    k = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = at % C
    column = at // (E * E * C)
    i = (at // (E * C)) % E - column // (POOL * O)
    j = (at // C) % E - (column // O) % POOL
    inside = (i >= 0) & (i < S) & (j >= 0) & (j < S) & (at < SIZE)
    w = tl.load(w_ptr + k * w_run + (((column % O) * S + i) * S + j) * C + c, mask=inside, other=0.0)
    tl.store(out_ptr + k * SIZE + at, w, mask=at < SIZE)


@triton.jit
def _window(e, W: tl.constexpr, C: tl.constexpr, E: tl.constexpr, VECTOR: tl.constexpr):
    """Where window element e lies from the window's corner. Elements come in aligned groups of VECTOR neighbours."""
    e = e % (E * E * C)
    return tl.max_contiguous(tl.multiple_of((e // (E * C)) * (W * C) + e % (E * C), VECTOR), VECTOR)


@triton.jit
def _better(best, origin, candidate, q: tl.constexpr):
    better = (candidate > best) | (candidate != candidate)  # a NaN wins, as in torch
    return tl.where(better, candidate, best), tl.where(better, q, origin)


@triton.jit
def forward(
    x_ptr, w_ptr, bias_ptr, factor_ptr, y_ptr, origin_ptr, x_run, w_run, bias_run, rows, factor_run, factor_row,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, S: tl.constexpr, O: tl.constexpr,  # noqa: E741
    POOL: tl.constexpr, RELU: tl.constexpr, DROP: tl.constexpr, SAVE: tl.constexpr, VECTOR: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = dropout(relu(maxpool(conv(x) + bias))) and its origin; w is as `expand` leaves it."""
    E: tl.constexpr = S + POOL - 1
    SIZE: tl.constexpr = E * E * C
    PH: tl.constexpr = (H - S + 1) // POOL
    PW: tl.constexpr = (W - S + 1) // POOL
    k = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    safe = tl.minimum(row, rows - 1)
    n = safe // (PH * PW)
    corner = n * (H * W * C) + ((safe // PW) % PH) * (POOL * W * C) + (safe % PW) * (POOL * C)
    x_at = x_ptr + k * x_run + corner[:, None]
    w_at = w_ptr + k * w_run + o[None, :] * SIZE
    known = (o < O)[None, :]
    z0 = tl.zeros((BM, BO), tl.float32)
    z1 = tl.zeros((BM, BO), tl.float32)
    z2 = tl.zeros((BM, BO), tl.float32)
    z3 = tl.zeros((BM, BO), tl.float32)
    for e0 in range(0, SIZE, BE):
        e = e0 + tl.arange(0, BE)
        x = tl.load(x_at + _window(e, W, C, E, VECTOR)[None, :])
        inside = (e < SIZE)[:, None] & known
        z0 = tl.dot(x, tl.load(w_at + e[:, None], mask=inside, other=0.0), z0, input_precision=PRECISION)
        if POOL == 2:
            at = w_at + e[:, None] + O * SIZE
            z1 = tl.dot(x, tl.load(at, mask=inside, other=0.0), z1, input_precision=PRECISION)
            z2 = tl.dot(x, tl.load(at + O * SIZE, mask=inside, other=0.0), z2, input_precision=PRECISION)
            z3 = tl.dot(x, tl.load(at + 2 * O * SIZE, mask=inside, other=0.0), z3, input_precision=PRECISION)
    best = z0
    origin = tl.zeros((BM, BO), tl.int32)
    if POOL == 2:
        best, origin = _better(best, origin, z1, 1)
        best, origin = _better(best, origin, z2, 2)
        best, origin = _better(best, origin, z3, 3)
    best += tl.load(bias_ptr + k * bias_run + o, mask=o < O, other=0.0)[None, :]
    if RELU:
        origin = tl.where(best > 0, origin, -1)
        best = tl.where(best <= 0, 0.0, best)  # keeps NaN
    inside = (row < rows)[:, None] & known
    if DROP:
        best *= tl.load(factor_ptr + k * factor_run + n[:, None] * factor_row + o[None, :], mask=inside, other=0.0)
    to = (k * rows + row)[:, None] * O + o[None, :]
    tl.store(y_ptr + to, best, mask=inside)
    if SAVE:
        tl.store(origin_ptr + to, origin.to(tl.int8), mask=inside)


@triton.jit
def _candidates(
    d_ptr, origin_ptr, factor_ptr, row, inside, column, n, factor_row,
    O: tl.constexpr, Q: tl.constexpr, DROP: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """(rows, columns (q, o)): the gradient of every candidate; pointers are those of the run."""
    o = column % O
    known = inside[:, None] & (column < Q * O)[None, :]
    at = row[:, None] * O + o[None, :]
    d = tl.load(d_ptr + at, mask=known, other=0.0)
    origin = tl.load(origin_ptr + at, mask=known, other=-1)
    if DROP:
        d *= tl.load(factor_ptr + n[:, None] * factor_row + o[None, :], mask=known, other=0.0)
    return tl.where(origin == (column // O)[None, :], d, 0.0)


@triton.jit
def window_gradient(
    d_ptr, origin_ptr, factor_ptr, w_ptr, out_ptr, w_run, rows, factor_run, factor_row,
    C: tl.constexpr, S: tl.constexpr, O: tl.constexpr, POOL: tl.constexpr,  # noqa: E741
    POSITIONS: tl.constexpr, DROP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to every window, (K, rows, window); for a Linear that is the input's gradient."""
    Q: tl.constexpr = POOL * POOL
    SIZE: tl.constexpr = (S + POOL - 1) * (S + POOL - 1) * C
    k = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    start = k * rows * O
    total = tl.zeros((BM, BE), tl.float32)
    for column0 in range(0, Q * O, BK):
        column = column0 + tl.arange(0, BK)
        d = _candidates(
            d_ptr + start, origin_ptr + start, factor_ptr + k * factor_run,
            row, row < rows, column, row // POSITIONS, factor_row, O, Q, DROP,
        )  # fmt: skip
        w = tl.load(
            w_ptr + k * w_run + column[:, None] * SIZE + e[None, :],
            mask=(column < Q * O)[:, None] & (e < SIZE)[None, :],
            other=0.0,
        )
        total = tl.dot(d, w, total, input_precision=PRECISION)
    to = out_ptr + (k * rows + row)[:, None] * SIZE + e[None, :]
    tl.store(to, total, mask=(row < rows)[:, None] & (e < SIZE)[None, :])


@triton.jit
def fold(
    window_ptr, dx_ptr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, S: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up, for every pixel, its gradients in the windows that hold it."""
    E: tl.constexpr = S + POOL - 1
    REACH: tl.constexpr = (E + POOL - 1) // POOL
    PH: tl.constexpr = (H - S + 1) // POOL
    PW: tl.constexpr = (W - S + 1) // POOL
    sample = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = pixel < H * W * C
    c = pixel % C
    x = (pixel // C) % W
    y = pixel // (W * C)
    total = tl.zeros((BLOCK,), tl.float32)
    for a in tl.static_range(REACH):
        for b in tl.static_range(REACH):
            py = y // POOL - a
            px = x // POOL - b
            i = y - py * POOL
            j = x - px * POOL
            inside = (py >= 0) & (py < PH) & (px >= 0) & (px < PW) & (i < E) & (j < E) & known
            from_ = (py * PW + px) * (E * E * C) + (i * E + j) * C + c
            total += tl.load(window_ptr + sample * (PH * PW * E * E * C) + from_, mask=inside, other=0.0)
    tl.store(dx_ptr + sample * (H * W * C) + pixel, total, mask=known)


@triton.jit
def conv_weight_gradient(
    x_ptr, d_ptr, origin_ptr, factor_ptr, part_ptr, x_run, samples, splits, factor_run, factor_row,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, S: tl.constexpr, O: tl.constexpr,  # noqa: E741
    POOL: tl.constexpr, DROP: tl.constexpr, VECTOR: tl.constexpr, SPLIT: tl.constexpr,
    BP: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the expanded weight and the bias, summed over SPLIT samples: (K, splits, Q O, window + 1).

    Window element SIZE is a one: its gradient is the bias's.
    """
    E: tl.constexpr = S + POOL - 1
    SIZE: tl.constexpr = E * E * C
    Q: tl.constexpr = POOL * POOL
    PH: tl.constexpr = (H - S + 1) // POOL
    PW: tl.constexpr = (W - S + 1) // POOL
    P: tl.constexpr = PH * PW
    split = tl.program_id(1)
    k = tl.program_id(2).to(tl.int64)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    column = tl.arange(0, BQ)
    window = _window(e, W, C, E, VECTOR)[None, :]
    x_at = x_ptr + k * x_run + split * SPLIT * (H * W * C)
    start = (k * samples + split * SPLIT) * (P * O)
    factors = factor_ptr + k * factor_run + split * SPLIT * factor_row
    total = tl.zeros((BQ, BE), tl.float32)
    for row0 in range(0, SPLIT * P, BP):
        row = row0 + tl.arange(0, BP)
        inside = row < SPLIT * P
        d = _candidates(
            d_ptr + start, origin_ptr + start, factors, row, inside, column, row // P, factor_row, O, Q, DROP
        )
        row = tl.minimum(row, SPLIT * P - 1)
        corner = (row // P) * (H * W * C) + ((row // PW) % PH) * (POOL * W * C) + (row % PW) * (POOL * C)
        x = tl.load(x_at + corner[:, None] + window)
        x = tl.where((e == SIZE)[None, :], 1.0, x)
        total = tl.dot(tl.trans(d), x, total, input_precision=PRECISION)
    to = part_ptr + ((k * splits + split) * (Q * O) + column)[:, None] * (SIZE + 1) + e[None, :]
    tl.store(to, total, mask=(column < Q * O)[:, None] & (e <= SIZE)[None, :])


@triton.jit
def collect(
    part_ptr, gradient_ptr, second_ptr, out_run, splits,
    C: tl.constexpr, S: tl.constexpr, O: tl.constexpr, POOL: tl.constexpr,  # noqa: E741
    MOMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weight and bias from the expanded ones: the sum over candidates and splits, and of the splits' squares."""
    E: tl.constexpr = S + POOL - 1
    ROW: tl.constexpr = E * E * C + 1
    R: tl.constexpr = S * S * C
    k = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < O * R + O
    bias = at >= O * R
    o = tl.where(bias, at - O * R, at // R)
    r = at % R
    e = tl.where(bias, E * E * C, ((r // (S * C)) * E + (r // C) % S) * C + r % C)
    total = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    from_ = part_ptr + k * splits * (POOL * POOL * O * ROW) + o * ROW + e
    for split in range(splits):
        each = tl.zeros((BLOCK,), tl.float32)
        for q in tl.static_range(POOL * POOL):
            shift = tl.where(bias, 0, ((q // POOL) * E + q % POOL) * C)
            each += tl.load(from_ + (split * POOL * POOL + q) * (O * ROW) + shift, mask=inside, other=0.0)
        total += each
        if MOMENTS:
            second += each * each
    tl.store(gradient_ptr + k * out_run + at, total, mask=inside)
    if MOMENTS:
        tl.store(second_ptr + k * out_run + at, second, mask=inside)


@triton.jit
def linear_weight_gradient(
    x_ptr, d_ptr, origin_ptr, factor_ptr, gradient_ptr, second_ptr, out_run, samples, factor_run, factor_row,
    C: tl.constexpr, O: tl.constexpr, DROP: tl.constexpr, MOMENTS: tl.constexpr,  # noqa: E741
    BN: tl.constexpr, BE: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weight and bias of a Linear: a sample's gradient is an outer product, its square that of the squares."""
    k = tl.program_id(2).to(tl.int64)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    start = k * samples * O
    total = tl.zeros((BO, BE), tl.float32)
    second = tl.zeros((BO, BE), tl.float32)
    for n0 in range(0, samples, BN):
        n = n0 + tl.arange(0, BN)
        d = _candidates(
            d_ptr + start, origin_ptr + start, factor_ptr + k * factor_run,
            n, n < samples, o, n, factor_row, O, 1, DROP,
        )  # fmt: skip
        known = (n < samples)[:, None] & (e < C)[None, :]
        x = tl.load(x_ptr + (k * samples + n)[:, None] * C + e[None, :], mask=known, other=1.0)
        total = tl.dot(tl.trans(d), x, total, input_precision=PRECISION)
        if MOMENTS:
            second = tl.dot(tl.trans(d * d), x * x, second, input_precision=PRECISION)
    to = k * out_run + tl.where((e < C)[None, :], o[:, None] * C + e[None, :], O * C + o[:, None])
    inside = (e <= C)[None, :] & (o < O)[:, None]
    tl.store(gradient_ptr + to, total, mask=inside)
    if MOMENTS:
        tl.store(second_ptr + to, second, mask=inside)


@triton.jit
def _segment_sums(x_ptr, ends_ptr, out_ptr, width, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    k = tl.program_id(1).to(tl.int64)
    end = tl.load(ends_ptr + tensor)
    start = tl.load(ends_ptr + tensor - 1, mask=tensor > 0, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + k * width + i, mask=i < end, other=0.0)
    tl.store(out_ptr + k * tl.num_programs(0) + tensor, tl.sum(total))


def segment_sums(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(K, D) -> (K, L): sums over the segments that end before `ends`."""
    x = x.contiguous()
    out = x.new_empty(len(x), len(ends))
    _segment_sums[len(ends), len(x)](x, ends, out, x.shape[1], BLOCK=2048)
    return out
