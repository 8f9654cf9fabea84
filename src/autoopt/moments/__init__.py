"""One rule for each layer family: (layer, input, gradient of the output) -> second moments. Knows no optimizer."""

from autoopt.moments.operation import Moments, Operation
from autoopt.moments.registry import COVERED, Prepare, prepare_for, register

__all__ = ["COVERED", "Moments", "Operation", "Prepare", "prepare_for", "register"]
