"""PyTorch optimizers that set their own learning rate and momentum, for every layer at every step."""

from autoopt.diagnostics import Tuned
from autoopt.optim.adagrad import AutoAdaGrad
from autoopt.optim.adam import AutoAdam
from autoopt.optim.sgd import AutoSGD

__all__ = ["AutoAdaGrad", "AutoAdam", "AutoSGD", "Tuned"]
__version__ = "0.1.0.dev0"
