"""One rule for each layer family: (layer, input, gradient of the output) -> second moments. Knows no optimizer."""

from autoopt.moments.operation import Contributions, Moments, Operation, precision, wide
from autoopt.moments.product import Product, chunk, joined
from autoopt.moments.registry import Prepare, prepare_for, register

__all__ = [
    "Contributions", "Moments", "Operation", "Prepare", "Product", "chunk", "joined", "precision",
    "prepare_for", "register", "wide",
]  # fmt: skip
