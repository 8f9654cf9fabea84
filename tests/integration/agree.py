"""What it means that a framework did what the raw loop does."""

from typing import Any

import pytest
import torch
from torch import nn

from autoopt import AutoAdam, AutoSGD
from autoopt.watching import unwrap

either = pytest.mark.parametrize("make", [AutoSGD, AutoAdam])  # statistics in total and for every element

Run = tuple[nn.Module, Any]  # a model and the optimizer that trained it, in whatever wrapper


def assert_agree(run: Run, raw: Run) -> None:
    """The same weights to 1e-6, and the same noise: a smoothed rate would hide lost statistics for long."""
    for ours, theirs in zip(run[0].parameters(), raw[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for ours, theirs in zip(unwrap(run[1]).tuned().values(), unwrap(raw[1]).tuned().values(), strict=True):
        assert ours.noise > 0
        torch.testing.assert_close(
            [ours.lr, ours.momentum, ours.noise], [theirs.lr, theirs.momentum, theirs.noise], rtol=1e-4, atol=1e-6
        )
