"""An observed BatchNorm layer keeps the statistics that torch's own does, wherever they are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoopt import AutoSGD

KEYS = ("running_mean", "running_var")


def as_buffers(layer: nn.BatchNorm1d) -> None: ...


def as_parameters(layer: nn.BatchNorm1d) -> None:
    for key in KEYS:
        value = getattr(layer, key)
        delattr(layer, key)
        setattr(layer, key, nn.Parameter(value, requires_grad=False))


def as_attributes(layer: nn.BatchNorm1d) -> None:
    for key in KEYS:
        value: Tensor = getattr(layer, key)
        delattr(layer, key)
        setattr(layer, key, value)


def nowhere(layer: nn.BatchNorm1d) -> None:
    layer.running_mean = layer.running_var = None


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("keep", [as_buffers, as_parameters, as_attributes, nowhere])
def test_statistics(keep: Callable[[nn.BatchNorm1d], None], momentum: float | None) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    keep(plain[0])
    model = copy.deepcopy(plain)
    AutoSGD(model)
    for training in (True, True, False):
        x = torch.randn(5, 3)
        assert torch.equal(model.train(training)(x), plain.train(training)(x))
        for key in KEYS:
            ours, theirs = getattr(model[0], key), getattr(plain[0], key)
            assert ours is theirs is None or torch.equal(ours, theirs)


def test_one_row_has_no_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    AutoSGD(model)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.ones(1, 3))
