"""MNIST and the paper's CNN for it (section 5): two convolutions, dropout, 320 features, two linear layers."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from torch import nn

from autoopt_lab.engine.net import Conv, Dropout, Flatten, Linear, MaxPool, Net, ReLU
from autoopt_lab.tasks import Data, Task
from autoopt_lab.tasks.data import normalised, read_mnist

NET = Net(
    image=(1, 28, 28),
    layers=(
        Conv(10, kernel=5),
        MaxPool(),
        ReLU(),
        Conv(20, kernel=5),
        Dropout(0.5),
        MaxPool(),
        ReLU(),
        Flatten(),
        Linear(50),
        ReLU(),
        Dropout(0.5),
        Linear(10),
    ),
)


def model() -> nn.Module:
    return NET.module()


@cache
def data(folder: Path | None = None) -> Data:
    return normalised(read_mnist(folder), mean=(0.1307,), deviation=(0.3081,))


def task(folder: Path | None = None) -> Task:
    return Task(
        name="mnist",
        description="MNIST, 60,000 images to train on and 10,000 to test on; the paper's CNN (21,840 weights)",
        model=model,
        data=partial(data, folder),
        loss=nn.functional.nll_loss,
    )
