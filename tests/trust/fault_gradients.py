"""What is done to the gradients before the step, and modes of torch that are on meanwhile."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from contract.small import Batch, backward, batches, mlp, train
from trust.fault_loops import Models, beside, looped
from trust.faults import survives
from trust.subjects import Make, trained


@survives()
def gradients_replaced_by_equal_ones(make: Make) -> Models:
    def replace(model: nn.Sequential, _: Any) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()

    return beside(make, after=replace)


@survives()
def clipping_that_does_not_bite(make: Make) -> Models:
    def clip(model: nn.Sequential, _: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        nn.utils.clip_grad_value_(model.parameters(), 1e6)

    return beside(make, after=clip)


@survives(rounding=1e-9)
def clipping_by_norm(make: Make) -> Models:
    """The clipped gradient is that of a smaller loss."""
    clipped, smaller = mlp(torch.float64), mlp(torch.float64)
    first, second = make(clipped), make(smaller)
    for x, y in batches(3, dtype=torch.float64):
        first.zero_grad()
        second.zero_grad()
        backward(clipped, (x, y))
        norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
        (F.cross_entropy(smaller(x), y) * (0.1 / (norm + 1e-6))).backward()
        first.step()
        second.step()
    return clipped, smaller


def with_scaler(make: Make, data: list[Batch], overflow: bool) -> nn.Module:
    model = mlp()
    optimizer, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    for number, (x, y) in enumerate(data):
        for bad in (True, False) if overflow and number else (False,):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x * torch.inf if bad else x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return model


@survives(rounding=1e-5)
def grad_scaler(make: Make) -> Models:
    return with_scaler(make, batches(3), overflow=False), trained(make)


@survives(rounding=1e-5)
def grad_scaler_that_skips_steps(make: Make) -> Models:
    return with_scaler(make, batches(3), overflow=True), trained(make)


@survives(rounding=1e-5)
def anomaly_mode(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        with torch.autograd.set_detect_anomaly(True):
            train(model, optimizer, [batch])

    return looped(make, body)


@survives()
def another_default_dtype(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            train(model, optimizer, [batch])
        finally:
            torch.set_default_dtype(torch.float32)

    return looped(make, body)


@survives()
def deterministic_algorithms(make: Make) -> Models:
    def body(model: nn.Sequential, optimizer: Any, batch: Batch) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            train(model, optimizer, [batch])
        finally:
            torch.use_deterministic_algorithms(False)

    return looped(make, body)
