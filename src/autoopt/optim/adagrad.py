"""AdaGrad: the root of the sum of all squared gradients as metric, eq. Hessian_AdaGrad."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from autoopt.capture import Source
from autoopt.optim.base import AutoOptimizer
from autoopt.optim.fused import Form
from autoopt.optim.options import Shared, number
from autoopt.optim.reading import Reading


class AutoAdaGrad(AutoOptimizer):
    """AdaGrad with an automatic learning rate and momentum for every tensor.

        opt = AutoAdaGrad(model)  # the rest of the training loop stays as it is

    Args:
        model: the model to train, or parameters as in torch.optim; see `AutoOptimizer` for this and the shared options.
        eps: added to the root of the sum.
        shared: the options that all automatic optimizers have.
    """

    elementwise = True
    metric_options = ("eps",)
    smoothing = 0.9995

    def __init__(self, model: nn.Module | Iterable[Any], *, eps: float = 1e-10, **shared: Unpack[Shared]) -> None:
        super().__init__(model, eps=eps, **shared)

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("square_sum",)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        number("eps", options["eps"], above=0.0)

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> Tensor:
        bucket = reading.bucket
        total = bucket.buffers["square_sum"].addcmul_(gradient, gradient)
        return torch.sqrt(total, out=bucket.scratch("metric")).add_(reading.group["eps"])

    def _form(self, group: dict[str, Any]) -> Form:
        return Form("square_sum", None, group["eps"])
