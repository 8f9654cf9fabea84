"""One step of the parameters of one bucket: metric, products, filter, length, weights, their average."""

from typing import Any, Protocol

import torch
from torch import Tensor

from autoopt import oracle
from autoopt.capture import Source
from autoopt.optim.bucket import AVERAGE, Bucket, masked
from autoopt.optim.reading import Reading
from autoopt.optim.rule import Products, Rule, Share


class Metric(Protocol):
    """What an optimizer says of its metric."""

    elementwise: bool

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor | None: ...
    def _direction(self, estimate: Tensor, gradient: Tensor, kept: Share, new: Share) -> Tensor: ...
    def _moved(self, group: dict[str, Any], bucket: Bucket, change: Tensor, rows: Tensor) -> None: ...


def move(optimizer: Metric, rule: Rule, source: Source, reading: Reading, finite: Tensor) -> None:
    """Move the units of one bucket. Every change passes through a mask, since only the device knows.

    `live` units have a finite gradient that is not zero; the `rows` that move are theirs, less those of tensors without
    a gradient.
    """
    group, bucket = reading.group, reading.bucket
    live = finite & (reading.size > 0)
    moves = bucket.of_tensors(live)
    if reading.present is not None:
        moves = moves & reading.present
    bucket.steps.add_(moves)
    bucket.keep("count", live, bucket.statistics["count"] + 1)
    rows = moves[bucket.tensor_of_row].unsqueeze(1)
    raw = masked(reading.gradient, rows)
    weights, decay = bucket.rows(bucket.params), group["weight_decay"]
    coupled = decay and not group["decoupled_weight_decay"]
    gradient = masked(raw + decay * weights, rows) if coupled else raw

    metric = optimizer._metric(source, reading, gradient, rows)  # Ĥ, Table 1
    products = _products(optimizer.elementwise, source, reading, live, metric, raw, gradient)
    kept, new = (p if isinstance(p, float) else bucket.spread(p) for p in rule.filter(group, bucket, products))
    estimate = bucket.buffers["estimate"].mul_(torch.where(rows, kept, bucket.one)).add_(new * gradient)
    direction = over(optimizer._direction(estimate, gradient, kept, new), metric)
    scale, shrink = rule.length(group, bucket, live, direction, weights)
    change = direction * bucket.spread(group["lr"] * scale)  # eq. w_update-1
    if decay and not coupled:
        change = change + weights * bucket.spread(group["lr"] * decay * shrink)
    change = masked(change, rows)
    optimizer._moved(group, bucket, change, rows)
    torch._foreach_sub_(bucket.params, bucket.tensors(change))  # type: ignore[arg-type]
    if group["average"]:
        newest = torch.where(rows, bucket.spread(oracle.relative.newest(bucket.statistics["count"])), bucket.zero)
        bucket.buffers[AVERAGE].lerp_(weights - change, newest)


def _products(
    elementwise: bool,
    source: Source,
    reading: Reading,
    live: Tensor,
    metric: Tensor | None,
    raw: Tensor,
    gradient: Tensor,
) -> Products:
    """The inner products of the gradient (`raw`: less weight decay) and the previous estimate, and V̂."""
    bucket, estimate = reading.bucket, reading.bucket.buffers["estimate"]  # m = ĝ of the step before
    natural = over(gradient, metric)
    gm, mm = bucket.sums(natural * estimate, over(estimate.square(), metric))
    raw_gg = reading.size if metric is None else bucket.sum(over(raw.square(), metric))
    gg = raw_gg if raw is gradient else bucket.sum(gradient * natural)
    square = bucket.sum(over(reading.square, metric)) if elementwise else reading.square
    samples = reading.samples
    if source.ranks > 1:
        square, samples = source.over_ranks(torch.stack([square / source.ranks**2, samples]))
    variance = oracle.variance(square, raw_gg, samples)  # V̂, of the gradient alone: decay has no noise
    measured = live & (samples > 1) & (gg > 0)
    bucket.keep("noise", measured, variance / raw_gg)
    return Products(gg, gm, mm, variance, live, measured)


def over(x: Tensor, metric: Tensor | None) -> Tensor:
    """Ĥ⁻¹ x."""
    return x if metric is None else x / metric
