"""Gauss-Newton: the average squared gradient of a sample as metric, the diagonal of the empirical Fisher matrix."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from autoopt.capture import Source
from autoopt.optim.base import AutoOptimizer
from autoopt.optim.bucket import bits_of, mask_
from autoopt.optim.options import Shared, number
from autoopt.optim.reading import Reading

LOST = 1e5  # times the smallest number that is exact, below which a curvature is none


class AutoGaussNewton(AutoOptimizer):
    """A diagonal Gauss-Newton method, with an automatic learning rate and momentum for every tensor.

    Where Adam divides by the root of the squared gradient of the batch, this divides by the mean over its *samples* of
    the squared gradient, Ĥ = E[(∂ℓ_i)²]: for a loss that is a log-likelihood, the expectation of its Hessian. Only an
    optimizer that sees the samples can. With c_i what sample i adds to the gradient, Ĥ = N Σ_i c_i².

    Args:
        model: the model to train; see `AutoOptimizer` for this and the shared options.
        decay: of the average over the steps, which is a plain mean at first.
        damping: added to Ĥ, as a share of its mean over the tensor: curvature below it is not trusted.
        shared: the options that all automatic optimizers have.
    """

    elementwise = True
    asks_all = True  # the squares of few samples are no curvature
    metric_options = ("decay", "damping")
    smoothing = 0.99999

    def __init__(
        self, model: nn.Module | Iterable[Any], *, decay: float = 0.99, damping: float = 0.1, **shared: Unpack[Shared]
    ) -> None:
        super().__init__(model, decay=decay, damping=damping, **shared)
        if self.defaults["spread"] != "samples":
            self.detach()
            raise ValueError("AutoGaussNewton needs the samples of the model: write AutoGaussNewton(model).")

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("curvature",)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        number("decay", options["decay"], low=0.0, below=1.0)
        number("damping", options["damping"], above=0.0)

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor:
        group, bucket = reading.group, reading.bucket
        curvature = bucket.buffers["curvature"]
        if reading.moments is not None:
            square, samples = reading.moments.of_all(source, bucket)
            square = torch.mul(square, bucket.spread(samples), out=bucket.scratch("natural"))
            mask_(square, bits_of(rows, bucket.compute))  # what is not finite must not pass
            # a plain mean at first: an average that starts at zero would make the first steps, which the rule measures
            # the later ones by, 1/(1 - decay) times too long
            newest = bucket.column((1 / bucket.steps.clamp_min(1)).clamp_min(1 - group["decay"]))
            none = bucket.spread(bucket.sum(curvature.sum(1))) == 0  # its first step measured nothing
            curvature.lerp_(square, torch.where(none, bucket.one, newest) * rows)
        mean = bucket.spread(bucket.sum(curvature.sum(1)) / bucket.elements)
        # a unit that has not moved yet has no curvature, and none of what it gets is used; where that is so small that
        # little is left of it but rounding, the direction would be infinite
        lost = mean < LOST * torch.finfo(mean.dtype).tiny
        return torch.add(curvature, group["damping"] * mean + lost.to(mean), out=bucket.scratch("metric"))
