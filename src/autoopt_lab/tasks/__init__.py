"""What is trained: a Task is a model, its data, its loss and its error. One file per task."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Data:
    """One fixed split, in memory: inputs and targets with the samples first."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def misclassified(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples whose highest output is not the target; NaN where the outputs are not finite."""
    if not outputs.isfinite().all():
        return float("nan")  # argmax of NaN is a class all the same: it would report chance, not divergence
    return (outputs.argmax(dim=1) != targets).double().mean().item()


@dataclass(frozen=True)
class Task:
    """What a run trains. The functions are module-level, so that a task can travel to another process."""

    name: str
    description: str  # one line for people: the data, the split, the model
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    error: Callable[[Tensor, Tensor], float] = misclassified
