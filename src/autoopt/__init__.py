"""PyTorch optimizers that set their own learning rate and momentum, for every layer at every step."""

from autoopt.diagnostics import Tuned
from autoopt.optim.adagrad import AutoAdaGrad
from autoopt.optim.adam import AutoAdam, AutoAdamW, AutoNAdam
from autoopt.optim.base import AutoOptimizer
from autoopt.optim.gauss_newton import AutoGaussNewton
from autoopt.optim.rmsprop import AutoAdaDelta, AutoRMSprop
from autoopt.optim.sgd import AutoSGD
from autoopt.recording import recorded
from autoopt.watching import watch

__all__ = [
    "AutoAdaDelta",
    "AutoAdaGrad",
    "AutoAdam",
    "AutoAdamW",
    "AutoGaussNewton",
    "AutoNAdam",
    "AutoOptimizer",
    "AutoRMSprop",
    "AutoSGD",
    "Tuned",
    "recorded",
    "watch",
]
__version__ = "0.1.0"
