"""RMSprop and AdaDelta: metrics from moving averages, without a correction of their start."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from autoopt.capture import Source
from autoopt.optim.base import AutoOptimizer
from autoopt.optim.bucket import Bucket
from autoopt.optim.options import Shared, flag, number
from autoopt.optim.reading import Reading


def averaged(bucket: Bucket, name: str, decay: float, value: Tensor, rows: Tensor) -> Tensor:
    """Take a value into a moving average, in the rows that move."""
    return bucket.buffers[name].lerp_(value, (1 - decay) * rows.to(bucket.compute))


def averaged_square(bucket: Bucket, name: str, decay: float, value: Tensor, rows: Tensor) -> Tensor:
    """Take the square of a value into a moving average, in the rows that move."""
    return averaged(bucket, name, decay, torch.square(value, out=bucket.scratch("natural")), rows)


class AutoRMSprop(AutoOptimizer):
    """RMSprop with an automatic learning rate and momentum for every tensor.

    Args:
        model: the model to train, or parameters as in torch.optim; see `AutoOptimizer` for this and the shared options.
        alpha: the decay of the average of squared gradients.
        eps: added to its root.
        centered: subtract the square of the average gradient.
        shared: the options that all automatic optimizers have.
    """

    elementwise = True
    metric_options = ("alpha", "eps", "centered")
    smoothing = 0.99999

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        centered: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(model, alpha=alpha, eps=eps, centered=centered, **shared)

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "square_average", *(("gradient_average",) if group["centered"] else ())

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        number("alpha", options["alpha"], low=0.0, below=1.0)
        number("eps", options["eps"], above=0.0)
        flag("centered", options["centered"])

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor:
        bucket, alpha = reading.bucket, reading.group["alpha"]
        square = averaged_square(bucket, "square_average", alpha, gradient, rows)
        if reading.group["centered"]:
            mean = averaged(bucket, "gradient_average", alpha, gradient, rows)
            spread = torch.square(mean, out=bucket.scratch("metric"))
            square = torch.sub(square, spread, out=spread).clamp_min_(0)
        return torch.sqrt(square, out=bucket.scratch("metric")).add_(reading.group["eps"])


class AutoAdaDelta(AutoOptimizer):
    """AdaDelta with an automatic learning rate and momentum for every tensor.

    Args:
        model: the model to train, or parameters as in torch.optim; see `AutoOptimizer` for this and the shared options.
        rho: the decay of both averages, of squared gradients and of squared changes.
        eps: added to both.
        shared: the options that all automatic optimizers have.
    """

    elementwise = True
    metric_options = ("rho", "eps")
    smoothing = 0.99999

    def __init__(
        self, model: nn.Module | Iterable[Any], *, rho: float = 0.9, eps: float = 1e-6, **shared: Unpack[Shared]
    ) -> None:
        super().__init__(model, rho=rho, eps=eps, **shared)

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "square_average", "change_average"

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        number("rho", options["rho"], low=0.0, below=1.0)
        number("eps", options["eps"], above=0.0)

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor:
        group, bucket = reading.group, reading.bucket
        square = averaged_square(bucket, "square_average", group["rho"], gradient, rows)
        change = torch.add(bucket.buffers["change_average"], group["eps"], out=bucket.scratch("natural"))
        metric: Tensor = torch.add(square, group["eps"], out=bucket.scratch("metric")).div_(change).sqrt_()
        return metric

    def _moved(self, group: dict[str, Any], bucket: Bucket, change: Tensor, rows: Tensor) -> None:
        averaged_square(bucket, "change_average", group["rho"], change, rows)
