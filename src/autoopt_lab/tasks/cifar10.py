"""CIFAR-10 and the paper's CNN for it (section 5): two convolutions, 400 features, three linear layers."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from torch import nn

from autoopt_lab.engine.net import Conv, Flatten, Linear, MaxPool, Net, ReLU
from autoopt_lab.tasks import Data, Task
from autoopt_lab.tasks.data import normalised, read_cifar10

NET = Net(
    image=(3, 32, 32),
    layers=(
        Conv(6, kernel=5),
        ReLU(),
        MaxPool(),
        Conv(16, kernel=5),
        ReLU(),
        MaxPool(),
        Flatten(),
        Linear(120),
        ReLU(),
        Linear(84),
        ReLU(),
        Linear(10),
    ),
)


def model() -> nn.Module:
    return NET.module()


@cache
def data(folder: Path | None = None) -> Data:
    return normalised(read_cifar10(folder), mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5))


def task(folder: Path | None = None) -> Task:
    return Task(
        name="cifar10",
        description="CIFAR-10, 50,000 images to train on and 10,000 to test on; the paper's CNN (62,006 weights)",
        model=model,
        data=partial(data, folder),
        loss=nn.functional.nll_loss,
    )
