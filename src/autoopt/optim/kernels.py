# mypy: ignore-errors
# (Triton's kernel language is not typed Python.)
"""GPU kernels of a step: one reads everything and sums, the other reads everything again and writes.

Between them lie the few numbers per unit that a rule works on. Each tensor is read and written where it lies, by its
address, and each buffer by its rows. Every number is summed in one fixed order, so two runs
agree to the last bit. The twin in plain PyTorch is `step.move`. Imported only where `fused` says so.
"""

import triton
import triton.language as tl

TILE = 4  # rows that a program holds at once
WARPS = 8
# METRIC: 0 is the identity, 1 an average of squares, 2 their sum


@triton.jit
def _places(addresses, tensor, within, known, column, ALIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """Where the elements of some rows lie, in tensors whose addresses are in a table."""
    address = tl.load(addresses + tensor, mask=known, other=0)
    start = address.to(tl.pointer_type(tl.float32)) + within * WIDTH
    if ALIGNED:
        start = tl.multiple_of(start, [16])  # bytes, so that four elements are one access
    return start[:, None] + column[None, :]


@triton.jit
def _metric(second, g, known, weight, share, eps, METRIC: tl.constexpr):
    """What the metric keeps after the gradient g, and that of Ĥ⁻¹. `share` is 1 - β2, `weight` 1/(1 - β2^t)."""
    if METRIC == 1:
        second += tl.where(known, share, 0.0)[:, None] * (g * g - second)
        h = tl.sqrt_rn(second * weight[:, None]) + eps
    else:
        second += g * g
        h = tl.sqrt_rn(second) + eps
    return second, tl.div_rn(tl.full(h.shape, 1.0, tl.float32), h)


@triton.jit
def _row_sums(
    gradient, square, estimate, second, weights, tensor, within, row, valid, left, present, corrections, factors,
    kept, new, share, eps, weight_decay,
    METRIC: tl.constexpr, MEASURES: tl.constexpr, FACTORS: tl.constexpr, PRESENT: tl.constexpr, COUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums over each of some rows, in the order of `fused.Sums`. WHOLE: none ends before its last column."""
    column = tl.arange(0, WIDTH)
    has = valid
    if PRESENT:
        has = valid & (tl.load(present + tensor, mask=valid, other=0) != 0)
    inside = valid[:, None] if WHOLE else valid[:, None] & (column[None, :] < left[:, None])
    given = has[:, None] if WHOLE else has[:, None] & (column[None, :] < left[:, None])
    rows = row[:, None] * WIDTH + column[None, :]
    raw = tl.load(_places(gradient, tensor, within, valid, column, ALIGNED, WIDTH), mask=given, other=0.0)
    w = tl.load(_places(weights, tensor, within, valid, column, ALIGNED, WIDTH), mask=inside, other=0.0)
    u = tl.load(estimate + rows, mask=valid[:, None], other=0.0)
    g = raw
    if COUPLED:
        g = tl.where(has[:, None], raw + weight_decay * w, 0.0)
    size = tl.sum(raw * raw, 1)
    spread = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE,), tl.float32)
    raw_gg = size
    filtered = tl.where(has[:, None], kept * u, u) + new * g
    natural = g
    if METRIC != 0:
        s = tl.load(second + rows, mask=valid[:, None], other=0.0)
        weight = tl.full((TILE,), 1.0, tl.float32)
        if METRIC == 1:
            weight = 1 / tl.load(corrections + tensor, mask=valid, other=1.0).to(tl.float32)
        s, inverse = _metric(s, g, has, weight, share, eps, METRIC)
        natural = g * inverse
        filtered = filtered * inverse
        raw_gg = tl.sum(raw * raw * inverse, 1)
        if MEASURES:
            places = _places(square, tensor, within, valid, column, ALIGNED, WIDTH)
            c = tl.load(places, mask=given, other=0.0)
            if FACTORS:
                factor = tl.load(factors + tensor, mask=valid, other=1.0)
                c = c * (factor * factor)[:, None]
            spread = tl.sum(c, 1)
            weighted = tl.sum(c * inverse, 1)
    gm = tl.sum(natural * u, 1)
    gg = raw_gg
    if COUPLED:
        gg = tl.sum(g * natural, 1)
    return size, gm, gg, raw_gg, spread, weighted, tl.sum(filtered * filtered, 1), tl.sum(w * w, 1)


@triton.jit
def sums(
    gradient, square, estimate, second, weights, out, starts, tensor_of_row, first_rows, elements, present, corrections,
    factors, kept, new, share, eps, weight_decay,
    METRIC: tl.constexpr, MEASURES: tl.constexpr, FACTORS: tl.constexpr, PRESENT: tl.constexpr, COUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums over one run of rows, all of one unit; those of a row in float32, theirs in float64."""
    run = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + run), tl.load(starts + run + 1)
    s0 = tl.zeros((TILE,), tl.float64)
    s1 = tl.zeros((TILE,), tl.float64)
    s2 = tl.zeros((TILE,), tl.float64)
    s3 = tl.zeros((TILE,), tl.float64)
    s4 = tl.zeros((TILE,), tl.float64)
    s5 = tl.zeros((TILE,), tl.float64)
    s6 = tl.zeros((TILE,), tl.float64)
    s7 = tl.zeros((TILE,), tl.float64)
    while begin < end:
        row = begin + tl.arange(0, TILE).to(tl.int64)
        valid = row < end
        tensor = tl.load(tensor_of_row + row, mask=valid, other=0)
        within = row - tl.load(first_rows + tensor, mask=valid, other=0)
        left = tl.load(elements + tensor, mask=valid, other=0) - within * WIDTH
        left = tl.where(valid, left, WIDTH)
        if tl.min(left, 0) >= WIDTH:
            r0, r1, r2, r3, r4, r5, r6, r7 = _row_sums(
                gradient, square, estimate, second, weights, tensor, within, row, valid, left, present, corrections,
                factors, kept, new, share, eps, weight_decay, METRIC, MEASURES, FACTORS, PRESENT, COUPLED,
                ALIGNED, True, TILE, WIDTH,
            )  # fmt: skip
        else:
            r0, r1, r2, r3, r4, r5, r6, r7 = _row_sums(
                gradient, square, estimate, second, weights, tensor, within, row, valid, left, present, corrections,
                factors, kept, new, share, eps, weight_decay, METRIC, MEASURES, FACTORS, PRESENT, COUPLED,
                ALIGNED, False, TILE, WIDTH,
            )  # fmt: skip
        s0 += r0
        s1 += r1
        s2 += r2
        s3 += r3
        s4 += r4
        s5 += r5
        s6 += r6
        s7 += r7
        begin += TILE
    to = out + run * 8
    tl.store(to, tl.sum(s0, 0))
    tl.store(to + 1, tl.sum(s1, 0))
    tl.store(to + 2, tl.sum(s2, 0))
    tl.store(to + 3, tl.sum(s3, 0))
    tl.store(to + 4, tl.sum(s4, 0))
    tl.store(to + 5, tl.sum(s5, 0))
    tl.store(to + 6, tl.sum(s6, 0))
    tl.store(to + 7, tl.sum(s7, 0))


@triton.jit
def _update_rows(
    gradient, estimate, second, weights, average, tensor, within, row, moved, left, scale, shrink, newest, corrections,
    kept, new, share, eps, weight_decay,
    METRIC: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, AVERAGES: tl.constexpr,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = moved[:, None] if WHOLE else moved[:, None] & (column[None, :] < left[:, None])
    rows = row[:, None] * WIDTH + column[None, :]
    g = tl.load(_places(gradient, tensor, within, moved, column, ALIGNED, WIDTH), mask=inside, other=0.0)
    to = _places(weights, tensor, within, moved, column, ALIGNED, WIDTH)
    w = tl.load(to, mask=inside, other=0.0)
    u = tl.load(estimate + rows, mask=moved[:, None], other=0.0)
    if COUPLED:
        g = g + weight_decay * w
    u = kept * u + new * g
    tl.store(estimate + rows, u, mask=moved[:, None])
    change = u
    if METRIC != 0:
        s = tl.load(second + rows, mask=moved[:, None], other=0.0)
        weight = tl.full((TILE,), 1.0, tl.float32)
        if METRIC == 1:
            weight = 1 / tl.load(corrections + tensor, mask=moved, other=1.0).to(tl.float32)
        s, inverse = _metric(s, g, moved, weight, share, eps, METRIC)
        tl.store(second + rows, s, mask=moved[:, None])
        change = change * inverse
    change = change * scale[:, None]
    if DECOUPLED:
        change += w * shrink[:, None]
    w -= change
    tl.store(to, w, mask=inside)
    if AVERAGES:
        a = tl.load(average + rows, mask=moved[:, None], other=0.0)
        n = newest[:, None]
        a = tl.where(n < 0.5, a + n * (w - a), w - (w - a) * (1 - n))  # as torch.lerp: 1 gives w exactly
        tl.store(average + rows, a, mask=moved[:, None])


@triton.jit
def update(
    gradient, estimate, second, weights, average, rows, tensor_of_row, unit_of_row, first_rows, elements, moves, scales,
    shrinks, newests, corrections, kept, new, share, eps, weight_decay, lr,
    METRIC: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, AVERAGES: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Filter, metric, weights and their average, in the rows that move; nothing is written to the others."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE).to(tl.int64)
    valid = row < rows
    tensor = tl.load(tensor_of_row + row, mask=valid, other=0)
    unit = tl.load(unit_of_row + row, mask=valid, other=0)
    moved = valid & (tl.load(moves + tensor, mask=valid, other=0) != 0)
    within = row - tl.load(first_rows + tensor, mask=valid, other=0)
    left = tl.load(elements + tensor, mask=valid, other=0) - within * WIDTH
    left = tl.where(moved, left, WIDTH)
    scale = lr * tl.load(scales + unit, mask=moved, other=0.0).to(tl.float32)
    shrink = tl.zeros((TILE,), tl.float32)
    if DECOUPLED:
        shrink = lr * weight_decay * tl.load(shrinks + unit, mask=moved, other=0.0).to(tl.float32)
    newest = tl.zeros((TILE,), tl.float32)
    if AVERAGES:
        newest = tl.load(newests + unit, mask=moved, other=0.0).to(tl.float32)
    if tl.min(left, 0) >= WIDTH:
        _update_rows(
            gradient, estimate, second, weights, average, tensor, within, row, moved, left, scale, shrink, newest,
            corrections, kept, new, share, eps, weight_decay, METRIC, COUPLED, DECOUPLED, AVERAGES,
            ALIGNED, True, TILE, WIDTH,
        )  # fmt: skip
    else:
        _update_rows(
            gradient, estimate, second, weights, average, tensor, within, row, moved, left, scale, shrink, newest,
            corrections, kept, new, share, eps, weight_decay, METRIC, COUPLED, DECOUPLED, AVERAGES,
            ALIGNED, False, TILE, WIDTH,
        )  # fmt: skip
