"""One step of the parameters of one bucket: metric, products, filter, length, weights, their average."""

from typing import Any, Protocol

import torch
from torch import Tensor

from autoopt import oracle
from autoopt.capture import Source
from autoopt.capture.aside import recording
from autoopt.optim import fused
from autoopt.optim.bucket import AVERAGE, ENLARGED, HELD, STATISTICS, Bucket, bits_of, mask_
from autoopt.optim.fused import Decision
from autoopt.optim.reading import Moments, Reading, Swept
from autoopt.optim.rule import Products, Rule


class Metric(Protocol):
    """What an optimizer says of its metric."""

    elementwise: bool

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor | None: ...
    def _direction(self, bucket: Bucket, estimate: Tensor, gradient: Tensor, kept: Tensor, new: Tensor) -> Tensor: ...
    def _moved(self, group: dict[str, Any], bucket: Bucket, change: Tensor, rows: Tensor) -> None: ...


def move(optimizer: Metric, rule: Rule, source: Source, reading: Reading | Swept, total: Tensor | None) -> None:
    """Move the units of one bucket. Every change passes through a mask, since only the device knows.

    Args:
        optimizer: has the metric.
        rule: decides.
        source: knows the ranks.
        reading: what to go by.
        total: finite where all is that must be, of all buckets and ranks; None: there are no others.
    """
    bucket = reading.bucket
    if ENLARGED in bucket.statistics and bucket.looks and not _traced(bucket):
        _look_at_inputs(source, bucket)
    if isinstance(reading, Swept):
        _move_swept(rule, source, reading, total)
    else:
        _move_rows(optimizer, rule, source, reading, total)


def _traced(bucket: Bucket) -> bool:
    """Whether the step becomes a graph, which every later step would run again."""
    return torch.compiler.is_compiling() or recording(bucket.device)


def _look_at_inputs(source: Source, bucket: Bucket) -> None:
    """Before the first step of a weight: how large is the data that it takes? One that shares its rate has no answer.

    With several ranks all have to ask at the same steps; else it is enough that something was noted.
    """
    noted = source.current.inputs
    if source.ranks > 1:
        bucket.looks -= 1
    elif not noted:
        return
    inputs = bucket.stack([noted.get(name) for name in bucket.names]).to(STATISTICS)
    known = (inputs > 0) & (inputs < torch.inf)
    if source.ranks > 1:
        inputs, ranks = source.over_ranks(torch.stack([torch.where(known, inputs, 0.0), known.to(inputs)]))
        inputs, known = inputs / ranks, ranks > 0
    first = bucket.statistics["age"] == 0
    bucket.keep(ENLARGED, first, torch.where(known, oracle.relative.enlarged(inputs), 1.0))


def _finite(reading: Reading | Swept, total: Tensor | None) -> Tensor:
    """Whether all is that must be."""
    return (reading.largest() if total is None else total) < torch.inf


def _movers(bucket: Bucket, size: Tensor, present: Tensor | None, finite: Tensor) -> tuple[Tensor, Tensor]:
    """The `live` units, which have a finite gradient that is not zero, and the tensors that move, theirs if present.

    They have taken one more step.
    """
    live = finite & (size > 0)
    moves = bucket.of_tensors(live)
    if present is not None:
        moves = moves & present
    bucket.steps.add_(moves)
    bucket.statistics["count"].add_(live)
    return live, moves


def _move_swept(rule: Rule, source: Source, swept: Swept, total: Tensor | None) -> None:
    """By the kernels, which filter as `Robust` does; the sums are there already."""
    sweep, samples = swept.sweep, swept.samples
    if source.ranks > 1 and (moments := swept.moments()) is not None:
        moments = moments.of_all(source, swept.bucket)
        sweep.sums.square.copy_(moments.square)
        samples = moments.samples
    if len(sweep.matrix) <= fused.UNITS:
        decision = sweep.decide(samples, total)
    else:
        decision = decided(rule, swept._replace(samples=samples), total)
    sweep.apply(decision)


def decided(rule: Rule, swept: Swept, total: Tensor | None) -> Decision:
    """What `Sweep.decide` does, by operations."""
    bucket, sums, present = swept.bucket, swept.sweep.sums, swept.sweep.present
    finite = _finite(swept, total)
    live, moves = _movers(bucket, sums.size, present, finite)
    products = _judged(bucket, live, sums.gm, None, sums.gg, sums.raw_gg, swept.moments())
    kept, _ = rule.filter(swept.group, bucket, products)
    scale, shrink = rule.length(swept.group, bucket, products, kept, lambda: (sums.direction, sums.weights))
    newest = oracle.relative.newest(bucket.statistics["count"])
    slowest = finite * newest.min()
    return Decision(moves.to(torch.uint8), scale, shrink, torch.cat([newest, slowest.view(1)]), kept)


def newest_of(reading: Reading | Swept, total: Tensor | None) -> Tensor:
    """The share of what is new in an average that goes by the unit that counted furthest; 0 where all stays."""
    if isinstance(reading, Swept):
        return reading.sweep.slowest
    return oracle.relative.newest(reading.bucket.statistics["count"].max()) * _finite(reading, total)


def _move_rows(optimizer: Metric, rule: Rule, source: Source, reading: Reading, total: Tensor | None) -> None:
    """By operations on all rows, in place; those that move are the rows of the tensors that do."""
    group, bucket = reading.group, reading.bucket
    live, moves = _movers(bucket, reading.size, reading.present, _finite(reading, total))
    rows = moves[bucket.tensor_column]
    bits = bits_of(rows, bucket.compute)
    raw = gradient = mask_(reading.gradient, bits)
    parameters, decay = bucket.here(bucket.params), group["weight_decay"]
    coupled = decay and not group["decoupled_weight_decay"]
    if coupled:
        gradient = mask_(bucket.rows(parameters, "decayed").mul_(decay).add_(raw), bits)

    metric = optimizer._metric(source, reading, gradient, rows)  # Ĥ, Table 1
    products = _products(optimizer.elementwise, rule, source, reading, live, metric, raw, gradient)
    share = rule.filter(group, bucket, products)
    kept, new = map(bucket.spread, share)
    estimate = bucket.buffers["estimate"].mul_(torch.where(rows, kept, bucket.one)).addcmul_(gradient, new)
    direction = over(bucket, optimizer._direction(bucket, estimate, gradient, kept, new), metric, "natural")
    weights = bucket.rows(parameters, "gradient")  # in its place: nothing needs it any more
    scale, shrink = rule.length(group, bucket, products, share[0], lambda: bucket.squares(direction, weights).unbind())
    change = torch.mul(direction, bucket.spread(group["lr"] * scale), out=bucket.scratch("spare"))  # eq. w_update-1
    if decay and not coupled:
        change.addcmul_(weights, bucket.spread(group["lr"] * decay * shrink))
    mask_(change, bits)
    torch._foreach_sub_(parameters, bucket.scratch_tensors(change))
    if group["average"]:
        newest = torch.where(rows, bucket.spread(oracle.relative.newest(bucket.statistics["count"])), bucket.zero)
        bucket.buffers[AVERAGE].lerp_(weights.sub_(change), newest)
    optimizer._moved(group, bucket, change, rows)


def _products(
    elementwise: bool,
    rule: Rule,
    source: Source,
    reading: Reading,
    live: Tensor,
    metric: Tensor | None,
    raw: Tensor,
    gradient: Tensor,
) -> Products:
    """The inner products of the gradient (`raw`: less weight decay) and the previous estimate, and V̂."""
    bucket, estimate = reading.bucket, reading.bucket.buffers["estimate"]  # m = ĝ of the step before
    of_samples = reading.moments
    if of_samples is not None and elementwise:
        of_row = over(bucket, of_samples.square, metric, "spare").sum(1)  # where Σ c² lies already
        of_samples = of_samples._replace(square=bucket.sums_here([of_row])[0])
    spare, natural = bucket.scratch("spare"), over(bucket, gradient, metric, "natural")
    columns = [torch.mul(natural, estimate, out=spare).sum(1)]
    if rule.asks_mm:
        columns.append(over(bucket, torch.square(estimate, out=spare), metric, "spare").sum(1))
    if metric is not None:
        of_raw = natural if raw is gradient else over(bucket, raw, metric, "spare")
        columns.append(torch.mul(raw, of_raw, out=spare).sum(1))
    if raw is not gradient:
        columns.append(torch.mul(gradient, natural, out=spare).sum(1))
    of_rows = bucket.sums_here(columns)
    if source.ranks > 1:
        of_rows, of_samples = _over_ranks(source, bucket, of_rows, of_samples)
    gm, *sizes = of_rows
    mm, sizes = (sizes[0], sizes[1:]) if rule.asks_mm else (None, sizes)
    raw_gg = reading.size if metric is None else sizes[0]
    gg = raw_gg if raw is gradient else sizes[-1]
    return _judged(bucket, live, gm, mm, gg, raw_gg, of_samples)


def _judged(
    bucket: Bucket, live: Tensor, gm: Tensor, mm: Tensor | None, gg: Tensor, raw_gg: Tensor, of_samples: Moments | None
) -> Products:
    """The products with V̂, from <g, g> without weight decay (`raw_gg`) and the spread of all samples, if it is seen."""
    if of_samples is None:
        variance = bucket.statistics[HELD]
        return Products(gg, gm, mm, variance, live, live & ~variance.isnan() & (gg > 0))

    square, samples = of_samples
    variance = oracle.variance(square, raw_gg, samples)  # V̂, of the gradient alone: decay has no noise
    measured = live & (samples > 1) & (gg > 0) & (variance < torch.inf)  # in the metric, which may be tiny
    bucket.keep("noise", measured, variance.clamp_min(0) / raw_gg)
    if HELD in bucket.statistics:
        bucket.keep(HELD, measured, variance)
    return Products(gg, gm, mm, variance, live, measured)


def _over_ranks(
    source: Source, bucket: Bucket, of_rows: Tensor, of_samples: Moments | None
) -> tuple[Tensor, Moments | None]:
    """The sums over all ranks: the samples are spread over them, and so are the rows if the parameters are sharded."""
    parts = [] if of_samples is None else [of_samples.square / source.ranks**2, of_samples.samples]
    spread = [*of_rows, *parts] if bucket.group is not None else parts
    if not spread:
        return of_rows, None
    summed = source.over_ranks(torch.stack(spread))
    of_rows = summed[: len(of_rows)] if bucket.group is not None else of_rows
    return of_rows, None if of_samples is None else Moments(*summed[-2:])


def over(bucket: Bucket, x: Tensor, metric: Tensor | None, name: str) -> Tensor:
    """Ĥ⁻¹ x, in the scratch of that name unless it is x itself."""
    return x if metric is None else torch.div(x, metric, out=bucket.scratch(name))
