"""The engine's kernels compile for an H200, though there is none here."""

from __future__ import annotations

import pytest
import torch
from engine_tools import NET

from interpreter import GPU, INTERPRETED

pytest.importorskip("triton", reason="the kernels are written in Triton")
from absent_gpu import compiled

pytestmark = pytest.mark.skipif(GPU or INTERPRETED, reason="the kernels themselves run here")
__all__ = ["compiled"]  # a fixture


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])
def test_a_step(precision: str, compiled: list[str]) -> None:
    from autoopt_lab.engine.fused import Fused

    weights, images = torch.randn(3, NET.parameters), torch.randn(3, 8, 11, 11, 2)
    factors = torch.ones(3, 8, 10)
    for moments in (False, True):
        Fused(NET, precision).gradients(weights, images, torch.zeros(3, 8, dtype=torch.int64), factors, moments)
    Fused(NET, precision).logits(weights, images[0])
    assert len(set(compiled)) == 7
