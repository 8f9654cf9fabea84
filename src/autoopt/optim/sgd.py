"""SGD: the identity as metric."""

from typing import Any

from torch import Tensor

from autoopt.capture import Source
from autoopt.optim.base import AutoOptimizer
from autoopt.optim.fused import Form
from autoopt.optim.reading import Reading


class AutoSGD(AutoOptimizer):
    """Stochastic gradient descent with an automatic learning rate and momentum for every tensor.

        opt = AutoSGD(model)  # the rest of the training loop stays as it is

    Its options are those that all automatic optimizers have, see `AutoOptimizer`.
    """

    elementwise = False
    smoothing = 0.999

    def _metric(self, source: Source, reading: Reading, gradient: Tensor, rows: Tensor) -> None:
        return None

    def _form(self, group: dict[str, Any]) -> Form:
        return Form()
