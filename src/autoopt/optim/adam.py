"""Adam: the root of a moving average of the squared gradient as metric, eq. Hessian_Adam."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.optim.base import AutoOptimizer
from autoopt.optim.bucket import Bucket
from autoopt.optim.options import number


class AutoAdam(AutoOptimizer):
    """Adam with an automatic learning rate and momentum (β1) for every tensor.

        opt = AutoAdam(model)  # the rest of the training loop stays as it is

    Args:
        model: the model to train; its layers report their statistics until `opt.detach()`.
        param_groups: groups as in torch.optim, for options of some parameters alone; default: all of the model's.
        lr: multiplies the automatic rate, so that learning rate schedulers work; 1 leaves it as it is.
        rule: "paper", Algorithm 1.
        smoothing: υ of eq. oracle_est_ewma. The default reproduces the paper's table.
        start: the (γ1, γ2) to start from; the rate is 1 - γ1.
        beta2: the decay of the average of squared gradients.
        eps: added to its root.
        amsgrad: use the largest average so far.
        weight_decay: coupled, added to the gradient, or decoupled as in AdamW.
        decoupled_weight_decay: shrink the weights by (1 - rate · weight_decay) instead.
        granularity: what shares one rate and momentum: each "tensor", a "layer" (weight and bias) or a "group".
    """

    elementwise = True

    def __init__(
        self,
        model: nn.Module,
        *,
        param_groups: Iterable[dict[str, Any]] | None = None,
        lr: float = 1.0,
        rule: str = "paper",
        smoothing: float = 0.99999,
        start: tuple[float, float] = (0.999, 0.0),
        beta2: float = 0.99,
        eps: float = 1e-8,
        amsgrad: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        granularity: str = "tensor",
    ) -> None:
        options = {
            "lr": lr, "rule": rule, "smoothing": smoothing, "start": start, "beta2": beta2, "eps": eps,
            "amsgrad": amsgrad, "weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay,
            "granularity": granularity,
        }  # fmt: skip
        super().__init__(model, param_groups, options)

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        largest = ("largest_square_average",) if group["amsgrad"] else ()
        return "estimate", "square_average", *largest

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        number("beta2", options["beta2"], low=0.0, below=1.0)
        number("eps", options["eps"], above=0.0)

    def _metric(self, group: dict[str, Any], bucket: Bucket, gradient: Tensor, rows: Tensor) -> Tensor:
        beta2 = group["beta2"]
        average = bucket.buffers["square_average"]
        decay = 1 - (1 - beta2) * rows.to(bucket.compute)  # of the rows that move
        average.mul_(decay).addcmul_(gradient, gradient, value=1 - beta2)
        if group["amsgrad"]:
            largest = bucket.buffers["largest_square_average"]
            average = torch.maximum(largest, average, out=largest)
        # 1 - β2^t; a tensor that has not moved yet (t = 0) has an average of zero, and none of what it gets is used
        weight = bucket.column(1 - beta2 ** bucket.steps.clamp_min(1))
        metric: Tensor = (average / weight).sqrt_().add_(group["eps"])
        return metric

    def _correction(self, bucket: Bucket) -> Tensor:
        """1 - β^t of eq. Hessian_Adam; with a β of its own at every step, β^t is their product."""
        return 1 - bucket.carry
