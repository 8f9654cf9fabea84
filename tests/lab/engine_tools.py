"""A small task for the engine's tests, and the same training as a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt_lab.engine import Conv, Dropout, Flatten, Linear, MaxPool, Net, Plan, ReLU, random
from autoopt_lab.tasks import Data

# An odd pooling size, two kinds of dropout, two channels: what the paper's nets have and more.
NET = Net(
    image=(2, 11, 11),
    layers=(
        Conv(3, kernel=3),
        ReLU(),
        MaxPool(),
        Conv(4, kernel=2),
        Dropout(0.25),
        MaxPool(),
        ReLU(),
        Flatten(),
        Linear(6),
        ReLU(),
        Dropout(0.5),
        Linear(5),
    ),
)


def data(samples: int = 48) -> Data:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples + 16, *NET.image, generator=generator, dtype=torch.float64)
    targets = (inputs.mean((1, 2, 3)) * 30).long() % NET.classes
    return Data(inputs[:samples], targets[:samples], inputs[samples:], targets[samples:])


def plain_loop(
    data: Data, plan: Plan, seed: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One run by nn.Module and an ordinary optimizer, on the batches and dropout factors of the engine's run."""
    torch.manual_seed(seed)
    model = NET.module().double()
    optim = optimizer(model)
    seeds, step = torch.tensor([seed]), 0
    rates = torch.tensor([0.25] * 4 + [0.5] * 6)
    for epoch in range(plan.epochs):
        order = random.orders(seeds, epoch, len(data.train_inputs))[0]
        for index in order.split(plan.batch):
            if len(index) < plan.batch:
                continue
            factors = random.dropout_factors(seeds, torch.tensor(step), plan.batch, rates, torch.float64)[0]
            optim.zero_grad()
            F.nll_loss(_forward(model, data.train_inputs[index], factors), data.train_targets[index]).backward()
            optim.step()
            step += 1
    return model, optim


def _forward(model: nn.Module, x: Tensor, factors: Tensor) -> Tensor:
    for layer in model.children():
        if isinstance(layer, nn.Dropout2d):
            x = x * factors[:, :4, None, None]
        elif isinstance(layer, nn.Dropout):
            x = x * factors[:, 4:]
        else:
            x = layer(x)
    return x
