"""The vectorised engine: many runs (settings x seeds) of a small net, trained side by side in one process."""

from autoopt_lab.engine.net import Conv, Dropout, Flatten, Linear, MaxPool, Net, ReLU
from autoopt_lab.engine.registry import RULES
from autoopt_lab.engine.train import Plan, Result, Run, train

__all__ = [
    "RULES",
    "Conv",
    "Dropout",
    "Flatten",
    "Linear",
    "MaxPool",
    "Net",
    "Plan",
    "ReLU",
    "Result",
    "Run",
    "train",
]
