"""Error and loss of K runs on one set of images."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IMAGES, RUNS = 1000, 128  # in one forward pass: bounds the memory


class Evaluation(NamedTuple):
    """(K,) each; NaN for a run whose outputs are not finite."""

    error: Tensor
    loss: Tensor


class Predictor(Protocol):
    def logits(self, weights: Tensor, images: Tensor) -> Tensor: ...


def evaluate(predictor: Predictor, weights: Tensor, images: Tensor, labels: Tensor) -> Evaluation:
    if not len(images):  # nobody asked
        nothing = weights.new_full((len(weights),), torch.nan, dtype=torch.float64)
        return Evaluation(nothing, nothing)
    if len(weights) > RUNS:
        parts = [evaluate(predictor, some, images, labels) for some in weights.split(RUNS)]
        return Evaluation(*(torch.cat(column) for column in zip(*parts, strict=True)))
    wrong = weights.new_zeros(len(weights), dtype=torch.float64)
    loss = torch.zeros_like(wrong)
    for some, truth in zip(images.split(IMAGES), labels.split(IMAGES), strict=True):
        logits = predictor.logits(weights, some)
        logs = F.log_softmax(logits, -1).gather(2, truth.expand(len(weights), -1)[..., None])[..., 0]
        missed = (logits.argmax(-1) != truth).to(torch.float64)
        # argmax of NaN is a class all the same: it would report chance, not divergence
        wrong += torch.where(logits.isfinite().all(-1), missed, torch.nan).sum(1)
        loss -= logs.double().sum(1)
    return Evaluation(wrong / len(images), loss / len(images))
