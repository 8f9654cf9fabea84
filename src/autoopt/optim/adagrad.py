"""AdaGrad: the root of the sum of all squared gradients as metric, eq. Hessian_AdaGrad."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from autoopt.optim.base import AutoOptimizer
from autoopt.optim.bucket import Bucket
from autoopt.optim.options import number


class AutoAdaGrad(AutoOptimizer):
    """AdaGrad with an automatic learning rate and momentum for every tensor.

        opt = AutoAdaGrad(model)  # the rest of the training loop stays as it is

    Args:
        model: the model to train; its layers report their statistics until `opt.detach()`.
        param_groups: groups as in torch.optim, for options of some parameters alone; default: all of the model's.
        lr: multiplies the automatic rate, so that learning rate schedulers work; 1 leaves it as it is.
        rule: "paper", Algorithm 1.
        smoothing: υ of eq. oracle_est_ewma. The default reproduces the paper's table.
        start: the (γ1, γ2) to start from; the rate is 1 - γ1.
        eps: added to the root of the sum.
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
        smoothing: float = 0.9995,
        start: tuple[float, float] = (0.999, 0.0),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        granularity: str = "tensor",
    ) -> None:
        options = {
            "lr": lr, "rule": rule, "smoothing": smoothing, "start": start, "eps": eps, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay, "granularity": granularity,
        }  # fmt: skip
        super().__init__(model, param_groups, options)

    def _buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "estimate", "square_sum"

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        number("eps", options["eps"], above=0.0)

    def _metric(self, group: dict[str, Any], bucket: Bucket, gradient: Tensor, rows: Tensor) -> Tensor:
        total = bucket.buffers["square_sum"].addcmul_(gradient, gradient)
        return total.sqrt().add_(group["eps"])
