"""scikit-learn's embedded handwritten digits: 1,797 images of 8 x 8, nothing to download."""

from collections import OrderedDict
from functools import cache
from pathlib import Path

import torch
from torch import nn

from autoopt_lab.engine.net import Conv, Flatten, Linear, MaxPool, Net, ReLU
from autoopt_lab.tasks import Data, Task

TRAIN = 1280  # 20 whole batches of 64; the other 517 images are the test set

NET = Net(  # for sweeps; it starts from the weights of `model` and does what that does
    image=(1, 8, 8),
    layers=(Conv(16, kernel=3), ReLU(), Conv(32, kernel=3), ReLU(), MaxPool(), Flatten(), Linear(10)),
)


def model() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, kernel_size=3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, kernel_size=3),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            linear=nn.Linear(128, 10),
        )
    )


@cache
def data(folder: Path | None = None) -> Data:
    """The split is the same for every run: neither the setting nor the seed moves an image."""
    del folder  # nothing is read from it
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = torch.as_tensor(pixels, dtype=torch.float32)[order].reshape(-1, 1, 8, 8)
    targets = torch.as_tensor(labels, dtype=torch.int64)[order]
    train = inputs[:TRAIN]
    inputs = (inputs - train.mean()) / train.std()
    return Data(inputs[:TRAIN], targets[:TRAIN], inputs[TRAIN:], targets[TRAIN:])


task = Task(
    name="digits",
    description="scikit-learn's 8 x 8 handwritten digits, 1,280 to train on and 517 to test on; "
    "a CNN of two convolutions and one linear layer (6,090 weights)",
    model=model,
    data=data,
)
