"""Adam and its kin: the root of a moving average of the squared gradient as metric, eq. Hessian_Adam."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from autoopt.capture import Source
from autoopt.optim.base import AutoOptimizer
from autoopt.optim.bucket import Bucket
from autoopt.optim.fused import Form
from autoopt.optim.options import Shared, flag, number
from autoopt.optim.reading import Reading
from autoopt.optim.rmsprop import averaged_square


class AutoAdam(AutoOptimizer):
    """Adam with an automatic learning rate and momentum (β1) for every tensor.

        opt = AutoAdam(model)  # the rest of the training loop stays as it is

    Args:
        model: the model to train, or parameters as in torch.optim; see `AutoOptimizer` for this and the shared options.
        beta2: the decay of the average of squared gradients.
        eps: added to its root.
        amsgrad: use the largest average so far.
        shared: the options that all automatic optimizers have.
    """

    elementwise = True
    corrected = True
    metric_options = ("beta2", "eps", "amsgrad")
    smoothing = 0.99999

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        *,
        beta2: float = 0.99,
        eps: float = 1e-8,
        amsgrad: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(model, beta2=beta2, eps=eps, amsgrad=amsgrad, **shared)

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        largest = ("largest_square_average",) if group["amsgrad"] else ()
        return "square_average", *largest

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        number("beta2", options["beta2"], low=0.0, below=1.0)
        number("eps", options["eps"], above=0.0)
        flag("amsgrad", options["amsgrad"])

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor:
        bucket, beta2 = reading.bucket, reading.group["beta2"]
        average = averaged_square(bucket, "square_average", beta2, gradient, rows)
        if reading.group["amsgrad"]:
            largest = bucket.buffers["largest_square_average"]
            average = torch.maximum(largest, average, out=largest)
        # 1 - β2^t; a tensor that has not moved yet (t = 0) has an average of zero, and none of what it gets is used
        weight = bucket.column(1 - beta2 ** bucket.steps.clamp_min(1))
        metric: Tensor = torch.div(average, weight, out=bucket.scratch("metric")).sqrt_().add_(reading.group["eps"])
        return metric

    def _form(self, group: dict[str, Any]) -> Form | None:
        return None if group["amsgrad"] else Form("square_average", group["beta2"], group["eps"])


class AutoAdamW(AutoAdam):
    """Adam with decoupled weight decay, and an automatic learning rate and momentum for every tensor.

        opt = AutoAdamW(model)  # the rest of the training loop stays as it is

    Args:
        model: the model to train, or parameters as in torch.optim; see `AutoOptimizer` for this and the shared options.
        weight_decay: by which share of the step's length relative to the weights these shrink.
        options: those of `AutoAdam`.
    """

    def __init__(self, model: nn.Module | Iterable[Any], *, weight_decay: float = 0.01, **options: Any) -> None:
        super().__init__(model, weight_decay=weight_decay, **{"decoupled_weight_decay": True, **options})


class AutoNAdam(AutoAdam):
    """Adam with Nesterov's momentum: the step looks one filtering ahead.

    Its options are those of `AutoAdam`.
    """

    def _direction(self, bucket: Bucket, estimate: Tensor, gradient: Tensor, kept: Tensor, new: Tensor) -> Tensor:
        return torch.mul(estimate, kept, out=bucket.scratch("spare")).addcmul_(gradient, new)
