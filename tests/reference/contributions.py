"""What each sample adds to the gradient, by giving every sample its own copy of every parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from reference.rows import ROWS

Loss = Callable[[Any], Tensor]
Model = TypeVar("Model", bound=nn.Module)


def double(model: Model) -> Model:
    """A float64 copy that computes the same function: RMSNorm's default eps is that of the type it came from."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(module.weight.dtype).eps
    return model.double()


def contributions(model: nn.Module, loss_of: Loss) -> dict[str, Tensor]:
    """c_i for every trainable parameter that took part, as tensors (N, *shape); g = sum_i c_i.

    Row i of each layer is computed with copy i of its parameters, and c_i is the gradient of the loss with respect to
    copy i. This also holds where the rows meet, as in BatchNorm. `loss_of(model)` runs the float64 model on the batch.
    """
    model = double(model)
    copies: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if type(layer) in ROWS:
            layer.forward = _by_rows(name, layer, copies)
    loss = loss_of(model)
    trainable = {name: c for name, c in copies.items() if c.requires_grad}
    gradients = torch.autograd.grad(loss, list(trainable.values()), materialize_grads=True)
    return dict(zip(trainable, gradients, strict=True))


def _by_rows(name: str, layer: Any, copies: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        samples = x.shape[0]
        mine: dict[str, Tensor] = {}
        for key, parameter in layer.named_parameters(recurse=False):
            mine[key] = torch.stack([parameter.detach()] * samples).requires_grad_(parameter.requires_grad)
            copies[f"{name}.{key}" if name else key] = mine[key]
        rows = []
        for i in range(samples):
            weight, bias = (mine[key][i] if key in mine else None for key in ("weight", "bias"))
            rows.append(ROWS[type(layer)](layer, x, i, weight, bias))
        return torch.stack(rows)

    return forward
