# mypy: ignore-errors
# (Triton's kernel language is not typed Python.)
"""GPU kernels of a step: one reads everything and sums, one decides, the last reads everything again and writes.

What is decided upon are a few numbers per unit. Each tensor is read and written where it lies, by its
address, and each buffer by its rows. Every number is summed in one fixed order, so two runs
agree to the last bit. The twin in plain PyTorch is `step.move`. Imported only where `fused` says so.
"""

import math

import torch
import triton
import triton.language as tl

from autoopt.oracle import relative

# METRIC: 0 is the identity, 1 an average of squares, 2 their sum
TILE = (2, 1, 1)  # rows that a program holds at once, by the metric: with one it holds more of each
WARPS = 2  # few, so that a sum over a row is soon there; both by measurement (docs/benchmarks.md)
# MEASURES: 0 is no spread, 1 the address of one number for each tensor, 2 that of one for each element

# Triton takes a number of the host for a float32, and a constexpr for what it is. It stands to the right of an
# operator: on the left of a tensor the interpreter would make a constexpr of both.
MOMENTUM = tl.constexpr(relative.MOMENTUM)
LOG_MOMENTUM = tl.constexpr(math.log(relative.MOMENTUM))
LIGHT = tl.constexpr(relative.LIGHT)
SPREADS = tl.constexpr((1 + relative.MOMENTUM) / (1 - relative.MOMENTUM))
SMOOTHING = tl.constexpr(relative.SMOOTHING)
LOG_SMOOTHING = tl.constexpr(math.log(relative.SMOOTHING))
LARGEST = tl.constexpr(relative.LARGEST)
EARLY = tl.constexpr(relative.EARLY)
SIGNAL = tl.constexpr(relative.SIGNAL)
DECAY = tl.constexpr(relative.DECAY)
ENOUGH = tl.constexpr(relative.ENOUGH)
ROOT_ENOUGH = tl.constexpr(relative.ENOUGH**0.5)
LEAST = tl.constexpr(relative.LEAST)
ROOT_CLEAR = tl.constexpr(relative.CLEAR**0.5)
MOST = tl.constexpr(relative.MOST)
WORST = tl.constexpr(relative.WORST)
WARM_UP = tl.constexpr(relative.WARM_UP)
LONGEST = tl.constexpr(relative.LONGEST)
FLOOR = tl.constexpr(relative.FLOOR)
GROWTH = tl.constexpr(relative.GROWTH)
WINDOW = tl.constexpr(relative.WINDOW)
STEADY = tl.constexpr(relative.STEADY)
FIRST = tl.constexpr(relative.FIRST)
USUAL = tl.constexpr(relative.USUAL)
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
INFINITY = tl.constexpr(math.inf)


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
def _weight(powers, tensor, known, has, share):
    """1/(1 - β2^t), t with this step where the tensor has a gradient; `powers` are those of the step before."""
    power = tl.load(powers + tensor, mask=known, other=0.0)
    rest = 1 - power + tl.where(has, power * share, 0.0)
    return (1 / tl.where(rest > 0, rest, 1.0)).to(tl.float32)  # never moved: nothing comes of it


@triton.jit
def _momentum(count, age):
    """As `relative.momentum`."""
    return count / age * (MOMENTUM - LIGHT) + LIGHT


@triton.jit
def _factor(sizes, tensor, known):
    """What the gradient was multiplied by since the backward pass, by its length now and then, as `Source.factors`."""
    now = tl.load(sizes + 2 * tensor, mask=known, other=1.0).to(tl.float32)
    before = tl.load(sizes + 2 * tensor + 1, mask=known, other=1.0).to(tl.float32)
    some = before > 0
    return tl.where(some, tl.div_rn(now, tl.where(some, before, 1.0)), 1.0)


@triton.jit
def _row_sums(
    gradient, square, estimate, second, weights, tensor, within, row, valid, left, present, powers, sizes,
    beta, share, eps, weight_decay,
    METRIC: tl.constexpr, MEASURES: tl.constexpr, CHANGED: tl.constexpr, PRESENT: tl.constexpr, COUPLED: tl.constexpr,
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
    filtered = tl.where(has[:, None], beta.to(tl.float32) * u, u) + (1 - beta).to(tl.float32) * g
    natural = g
    if METRIC != 0:
        s = tl.load(second + rows, mask=valid[:, None], other=0.0)
        weight = tl.full((TILE,), 1.0, tl.float32)
        if METRIC == 1:
            weight = _weight(powers, tensor, valid, has, share)
        s, inverse = _metric(s, g, has, weight, share, eps, METRIC)
        natural = g * inverse
        filtered = filtered * inverse
        raw_gg = tl.sum(raw * raw * inverse, 1)
    if MEASURES == 1:
        first = has & (within == 0)  # of each tensor
        address = tl.load(square + tensor, mask=first, other=0)
        some = first & (address != 0)  # a rank without samples has none
        spread = tl.load(address.to(tl.pointer_type(tl.float32)), mask=some, other=0.0).to(tl.float64)
        if CHANGED:
            factor = _factor(sizes, tensor, first)
            spread = spread * (factor * factor)
        weighted = spread
    if MEASURES == 2:
        places = _places(square, tensor, within, valid, column, ALIGNED, WIDTH)
        some = tl.load(square + tensor, mask=valid, other=0) != 0  # a rank without samples has none
        c = tl.load(places, mask=given & some[:, None], other=0.0)
        if CHANGED:
            factor = _factor(sizes, tensor, valid)
            c = c * (factor * factor)[:, None]
        spread = tl.sum(c, 1)
        weighted = spread if METRIC == 0 else tl.sum(c * inverse, 1)
    gm = tl.sum(natural * u, 1)
    gg = raw_gg
    if COUPLED:
        gg = tl.sum(g * natural, 1)
    return size, gm, gg, raw_gg, spread, weighted, tl.sum(filtered * filtered, 1), tl.sum(w * w, 1)


@triton.jit
def sums(
    gradient, square, estimate, second, weights, out, starts, tensor_of_row, unit_of_row, first_rows, elements, present,
    powers, sizes, counts, ages, share, eps, weight_decay,
    METRIC: tl.constexpr, MEASURES: tl.constexpr, CHANGED: tl.constexpr, PRESENT: tl.constexpr, COUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums over one run of rows, all of one unit; those of a row in float32, theirs in float64."""
    run = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + run), tl.load(starts + run + 1)
    unit = tl.load(unit_of_row + begin, mask=begin < end, other=0)  # the last unit may have no rows
    beta = _momentum(tl.load(counts + unit) + 1, tl.load(ages + unit) + 1)  # both with this step
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
                gradient, square, estimate, second, weights, tensor, within, row, valid, left, present, powers,
                sizes, beta, share, eps, weight_decay, METRIC, MEASURES, CHANGED, PRESENT, COUPLED,
                ALIGNED, True, TILE, WIDTH,
            )  # fmt: skip
        else:
            r0, r1, r2, r3, r4, r5, r6, r7 = _row_sums(
                gradient, square, estimate, second, weights, tensor, within, row, valid, left, present, powers,
                sizes, beta, share, eps, weight_decay, METRIC, MEASURES, CHANGED, PRESENT, COUPLED,
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
def _larger(a, b):
    """As torch.maximum: not a number where either is none."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _smaller(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def _drawn(average, new, PAST: tl.constexpr):
    """The average with what is new in it, as torch.lerp."""
    return average + (new - average) * (1 - PAST)


@triton.jit
def _corrected(average, steps):
    """As `robust._corrected`."""
    return average / (1 - tl.exp(steps * LOG_SMOOTHING))


@triton.jit
def _mean(values, known):
    """Over the units of which it is known, in every lane; no number where there are none."""
    return tl.zeros_like(values) + tl.sum(tl.where(known, values, 0.0), 0) / tl.sum(known.to(tl.float64), 0)


@triton.jit
def _travels(alignment, lasting, noise, usual, age, live):
    """As `relative.travels`."""
    limit = noise * STEADY
    by_noise = _mean(alignment / limit, live & (age > FIRST) & (limit > 0))
    by_usual = _mean(lasting / usual, live & (age > USUAL) & (usual > 0))
    return (by_noise > 1) | (by_usual > 1)


@triton.jit
def _signal(variance, gradient, known):
    """As `relative.signal`, in every lane."""
    known = known & (gradient > 0)
    some = tl.zeros_like(gradient) + tl.sum(known.to(tl.float64), 0) > 0
    return tl.where(some, _mean(_larger(1 - variance / gradient, WORST), known), ENOUGH)


@triton.jit
def _relative_step(count, age, share):
    """As `relative.relative_step`."""
    root = tl.sqrt(_larger(share, 0.0))
    largest = _smaller(_larger(_smaller(1 / tl.sqrt(age) * DECAY, root * root * root * SIGNAL), LARGEST), EARLY)
    less, more = _smaller(_larger(root / ROOT_ENOUGH, LEAST), 1.0), _smaller(_larger(root / ROOT_CLEAR, 1.0), MOST)
    decay = less * more * DECAY
    return _smaller(1 / tl.sqrt(count) * decay, largest) * _smaller(age / WARM_UP, 1.0)


@triton.jit
def _rate(ratio, weights, start, elements, enlarged, size, now):
    """As `relative.rate`."""
    least = elements * (FLOOR * FLOOR)
    least = enlarged * tl.where(enlarged > 1, _larger(start, least), least)
    bounded = _smaller(_larger(weights, least), _larger(start, least) * (GROWTH * GROWTH))
    length = _larger(size, now / (LONGEST * LONGEST))
    return tl.where(size > elements * SMALLEST, ratio * tl.sqrt(bounded / length), 0.0)


@triton.jit
def decide(
    sums, samples, total, present, unit_of_tensor, elements, enlargements,
    steps, counts, noises, helds, carries, ages, starts, sizes, gradients, variances, measurements, alignments, usuals,
    rates, moves, scales, shrinks, newests, betas, units,
    MEASURES: tl.constexpr, COUNTED: tl.constexpr, HOLDS: tl.constexpr, ALONE: tl.constexpr, PRESENT: tl.constexpr,
    TENSORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All of a step that is a number per unit: `step._judged`, then `Robust.length`; in one program, for all units.

    Every lane computes everything, and a store passes through the mask by which the twin keeps the statistic.
    MEASURES: the sums hold a spread. COUNTED: N is on the device. HOLDS: the last V̂ is held. ALONE: there are no sums
    but these that must be finite.
    """
    unit = tl.arange(0, BLOCK)
    valid = unit < units
    row = sums + unit * 8
    size_g = tl.load(row, mask=valid, other=0.0)
    gm = tl.load(row + 1, mask=valid, other=0.0)
    gg = tl.load(row + 2, mask=valid, other=0.0)
    raw_gg = tl.load(row + 3, mask=valid, other=0.0)
    spread = tl.load(row + 4, mask=valid, other=0.0)
    direction = tl.load(row + 6, mask=valid, other=0.0)
    weights = tl.load(row + 7, mask=valid, other=0.0)
    count = tl.load(counts + unit, mask=valid, other=0.0)
    carry = tl.load(carries + unit, mask=valid, other=0.0)
    age = tl.load(ages + unit, mask=valid, other=0.0)
    start = tl.load(starts + unit, mask=valid, other=0.0)
    size = tl.load(sizes + unit, mask=valid, other=0.0)
    gradient = tl.load(gradients + unit, mask=valid, other=0.0)
    variance = tl.load(variances + unit, mask=valid, other=0.0)
    seen = tl.load(measurements + unit, mask=valid, other=0.0)
    alignment = tl.load(alignments + unit, mask=valid, other=0.0)
    usual = tl.load(usuals + unit, mask=valid, other=0.0)
    rate = tl.load(rates + unit, mask=valid, other=0.0)
    of_all = tl.load(elements + unit, mask=valid, other=1.0)
    enlarged = tl.load(enlargements + unit, mask=valid, other=1.0)
    largest = tl.sum(size_g + spread, 0) if ALONE else tl.load(total)
    finite = tl.zeros_like(gg) + largest < INFINITY  # in every lane: the interpreter has no mask of one
    live = valid & finite & (size_g > 0)
    later = live & (age > 0)  # the first step has no alignment
    if MEASURES:
        n = tl.load(samples + unit, mask=valid, other=0.0) if COUNTED else tl.zeros_like(gg) + samples
        v = (n / (n - 1)) * (tl.load(row + 5, mask=valid, other=0.0) - raw_gg / n)  # V̂
        measured = live & (n > 1) & (gg > 0) & (v < INFINITY)
    else:
        v = tl.load(helds + unit, mask=valid, other=0.0)
        measured = live & (v == v) & (gg > 0)
    beta = _momentum(count + live.to(tl.float64), age + 1)
    tl.debug_barrier()  # several threads may hold one lane: all have read what follows writes

    # whether the weights travel, by what was known before this step and by its alignment
    estimate = gm / (1 - carry)
    noise = tl.where(seen > 0, _larger(_corrected(variance, seen), 0.0), _corrected(gradient, age))
    before = alignment
    alignment = tl.where(later, _drawn(alignment, estimate, MOMENTUM), alignment)
    lasting, rest = _smaller(alignment, before), 1 - tl.exp(age * LOG_MOMENTUM)
    travels = _travels(alignment / rest, lasting / rest, noise, tl.sqrt(_corrected(usual, age - 1)), age, live)
    count += live.to(tl.float64)
    count = tl.where(live & travels, count / 2, count)

    # what is known with this step
    carry = tl.where(live, carry * beta, carry)
    correction = 1 - carry
    age += live.to(tl.float64)
    seen += measured.to(tl.float64)
    first = live & (age == 1)
    start = tl.where(first, weights, start)
    with_gradient = measured | (live & (seen == 0))
    gradient = tl.where(measured & (seen == 1), 0.0, gradient)  # it begins again with the first V̂
    gradient = tl.where(with_gradient, _drawn(gradient, gg, SMOOTHING), gradient)
    variance = tl.where(measured, _drawn(variance, v, SMOOTHING), variance)
    now = direction / (correction * correction)
    size = tl.where(live, _drawn(size, now, SMOOTHING), size)

    # the length of the step
    share = _signal(variance, gradient, live & (seen > 0))
    ratio = _relative_step(count, age, share) * tl.sqrt((1 - beta) / (1 + beta) * SPREADS)
    rate = tl.where(live, _rate(ratio, weights, start, of_all, enlarged, _corrected(size, age), now), rate)
    newest = tl.full((BLOCK,), WINDOW + 1, tl.float64) / (_larger(count, 1.0) + WINDOW)

    if MEASURES:
        tl.store(noises + unit, _larger(v, 0.0) / raw_gg, mask=measured)
        if HOLDS:
            tl.store(helds + unit, v, mask=measured)
    tl.store(counts + unit, count, mask=live)
    tl.store(carries + unit, carry, mask=live)
    tl.store(ages + unit, age, mask=live)
    tl.store(starts + unit, start, mask=first)
    tl.store(sizes + unit, size, mask=live)
    tl.store(gradients + unit, gradient, mask=with_gradient)
    tl.store(variances + unit, variance, mask=measured)
    tl.store(measurements + unit, seen, mask=measured)
    tl.store(alignments + unit, alignment, mask=later)
    tl.store(usuals + unit, _drawn(usual, estimate * estimate, SMOOTHING), mask=later)
    tl.store(rates + unit, rate, mask=live)
    tl.store(scales + unit, rate / correction, mask=valid)
    tl.store(shrinks + unit, ratio, mask=valid)
    tl.store(newests + unit, newest, mask=valid)
    tl.store(betas + unit, beta, mask=valid)
    slowest = tl.min(tl.where(valid, newest, 1.0), 0)  # of the unit that counted furthest
    tl.store(newests + units, tl.min(tl.where(finite, slowest, 0.0), 0))

    # which tensors move
    for begin in range(0, TENSORS, BLOCK):
        tensor = begin + tl.arange(0, BLOCK)
        there = tensor < TENSORS
        step = tl.load(steps + tensor, mask=there, other=0.0)
        size_of = tl.load(sums + tl.load(unit_of_tensor + tensor, mask=there, other=0) * 8, mask=there, other=0.0)
        moved = there & finite & (size_of > 0)
        if PRESENT:
            moved = moved & (tl.load(present + tensor, mask=there, other=0) != 0)
        tl.debug_barrier()
        tl.store(steps + tensor, step + 1, mask=moved)
        tl.store(moves + tensor, moved.to(tl.uint8), mask=there)


@triton.jit
def _update_rows(
    gradient, estimate, second, weights, average, tensor, within, row, moved, left, scale, shrink, newest, beta,
    powers, share, eps, weight_decay,
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
    u = beta.to(tl.float32)[:, None] * u + (1 - beta).to(tl.float32)[:, None] * g
    tl.store(estimate + rows, u, mask=moved[:, None])
    change = u
    if METRIC != 0:
        s = tl.load(second + rows, mask=moved[:, None], other=0.0)
        weight = tl.full((TILE,), 1.0, tl.float32)
        if METRIC == 1:
            weight = _weight(powers, tensor, moved, moved, share)
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
    shrinks, newests, betas, powers, share, eps, weight_decay, lr,
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
    beta = tl.load(betas + unit, mask=moved, other=0.0)
    newest = tl.zeros((TILE,), tl.float32)
    if AVERAGES:
        newest = tl.load(newests + unit, mask=moved, other=0.0).to(tl.float32)
    if tl.min(left, 0) >= WIDTH:
        _update_rows(
            gradient, estimate, second, weights, average, tensor, within, row, moved, left, scale, shrink, newest,
            beta, powers, share, eps, weight_decay, METRIC, COUPLED, DECOUPLED, AVERAGES,
            ALIGNED, True, TILE, WIDTH,
        )  # fmt: skip
    else:
        _update_rows(
            gradient, estimate, second, weights, average, tensor, within, row, moved, left, scale, shrink, newest,
            beta, powers, share, eps, weight_decay, METRIC, COUPLED, DECOUPLED, AVERAGES,
            ALIGNED, False, TILE, WIDTH,
        )  # fmt: skip
