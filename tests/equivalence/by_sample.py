"""What each sample adds to the gradient, where samples do not meet: the gradient of its own loss alone.

The whole batch runs at once, so that dropout draws the same numbers as in the run that it is compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoopt.capture import Capture
from equivalence.cases import assert_close

Losses = Callable[[Any], Tensor]
"""A model -> the loss of each sample, (samples,)."""


def contributions(model: nn.Module, losses_of: Losses) -> dict[str, Tensor]:
    """c_i of every trainable parameter, (samples, *shape), for a loss that is the mean over the samples."""
    model = copy.deepcopy(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.manual_seed(11)
    losses = losses_of(model)
    rows = [
        torch.autograd.grad(loss / len(losses), list(named.values()), retain_graph=True, materialize_grads=True)
        for loss in losses
    ]
    return dict(zip(named, map(torch.stack, zip(*rows, strict=True)), strict=True))


def assert_exact(model: nn.Module, losses_of: Losses, elementwise: bool, passes: int = 1) -> Capture:
    """Outputs, gradients and second moments of the observed model against those of the plain one; float64."""
    expected = contributions(model, losses_of)
    torch.manual_seed(11)
    with torch.no_grad():
        plain = losses_of(model)
    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    for _ in range(passes):
        torch.manual_seed(11)
        losses = losses_of(model)
        assert_close(losses, plain, 1e-11, "losses")
        losses.mean().backward()
    for name, c in expected.items():
        square = passes * c.square().sum(0)
        assert_close(capture.second_moment(name), square if elementwise else square.sum(), 1e-10, name)
        assert capture.samples(name) == passes * len(losses), name
        assert_close(model.get_parameter(name).grad, passes * c.sum(0), 1e-10, f"gradient of {name}")
    return capture
