"""The kernels compile for an H200, the GPU that they were measured on, though there is none here.

The interpreter says what a kernel does, but not whether Triton can make one of it. The arguments are those of a step,
and with them what Triton makes of their types, their alignment and their constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoopt import AutoAdaGrad, AutoAdam, AutoAdamW, AutoSGD
from autoopt.capture import lengths
from autoopt.capture.lengths import Lengths
from autoopt.moments import Operation, building
from autoopt.moments.conv import Conv
from autoopt.moments.linear import Linear, Transposed
from autoopt.moments.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from autoopt.optim import fused
from interpreter import GPU, INTERPRETED

pytest.importorskip("triton", reason="the kernels are written in Triton")
from absent_gpu import compiled
from autoopt.moments import one, triton

pytestmark = pytest.mark.skipif(GPU or INTERPRETED, reason="the kernels themselves run here")
__all__ = ["compiled"]  # a fixture


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what lies on a CPU go the way of a GPU. What cannot be compiled is warned of, which is an error here."""
    monkeypatch.setattr(building, "_missed", set())
    for module in (lengths, fused):
        monkeypatch.setattr(module, "available", lambda device: True)
    monkeypatch.setattr(one, "processors", lambda device: 132)


def conv(kernel: int, stride: int = 1) -> Conv:
    each = (kernel, kernel)
    return Conv(each, (stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)


def batch_norm() -> BatchNorm:
    return BatchNorm(torch.zeros(64), torch.ones(64), True, 0.1, 1e-5)


# name -> operation, shapes of the input, of weight and bias
LAYERS: dict[str, tuple[Callable[[], Operation], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (Linear, (4, 70, 48), (200, 48), (200,)),
    "linear, large": (Linear, (4, 70, 1536), (1536, 1536), (1536,)),  # in half precision by larger tiles
    "transposed": (Transposed, (4, 70, 48), (48, 200), (200,)),
    "conv": (lambda: conv(3), (4, 48, 14, 14), (64, 48, 3, 3), (64,)),
    "conv of one channel": (lambda: conv(5), (4, 1, 28, 28), (10, 1, 5, 5), (10,)),
    "conv 1x1, stride": (lambda: conv(1, 2), (4, 64, 14, 14), (32, 64, 1, 1), (32,)),
    "batch norm": (batch_norm, (4, 64, 14, 14), (64,), (64,)),
    "group norm": (lambda: GroupNorm(4, 1e-5), (4, 64, 14, 14), (64,), (64,)),
    "layer norm": (lambda: LayerNorm((48,), 1e-5), (4, 70, 48), (48,), (48,)),
    "rms norm": (lambda: RMSNorm((48,), 1e-5), (4, 70, 48), (48,), ()),
}


@pytest.mark.parametrize("total", [False, True], ids=["elementwise", "total"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_sample_of_a_layer(name: str, dtype: torch.dtype, total: bool, compiled: list[str]) -> None:
    make, shape, *sizes = LAYERS[name]
    operation = make()
    x = torch.randn(shape, dtype=dtype)
    weight = torch.randn(sizes[0], dtype=dtype if operation.lowers else torch.float32)
    bias = torch.randn(sizes[1], dtype=weight.dtype) if sizes[1] else None
    y, kept = operation.forward(x, weight, bias)
    given = {role: part for role, part in (("weight", weight), ("bias", bias)) if part is not None}
    for roles in (list(given), ["weight"], ["bias"] if bias is not None else ["weight"]):
        strides = {role: given[role].stride() for role in roles}
        rows = list(range(len(roles))) if total else None
        plan = one.plan(operation, (torch.randn_like(y), *kept), 2, 4.0, strides, rows)
        assert plan is not None
        tensors, room = (torch.randn_like(y), *kept), torch.zeros(4, one.WIDTH)
        for _ in range(2):  # the second time by what the first one chose
            assert plan.start(tensors, room, room)
    assert len(compiled) == 3


STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (AutoSGD, {}),
    "SGD, coupled decay, every second": (AutoSGD, {"weight_decay": 0.1, "measure_every": 2}),
    "Adam": (AutoAdam, {}),
    "AdamW, by layers, no average": (AutoAdamW, {"weight_decay": 0.1, "granularity": "layer", "average": False}),
    "AdaGrad": (AutoAdaGrad, {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name: str, compiled: list[str]) -> None:
    make, options = STEPS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 600), nn.Tanh(), nn.Linear(600, 3))
    optimizer = make(model, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 37)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert Counter(compiled) == Counter({"squares": 6, "sums": 3, "decide": 3, "update": 3})


def test_lengths(compiled: list[str]) -> None:
    Lengths()([torch.randn(70, 40), torch.randn(3)])
    assert compiled == ["squares"]


@pytest.mark.parametrize("total", [False, True], ids=["elementwise", "total"])
def test_all_samples_of_a_layer(total: bool, compiled: list[str]) -> None:
    """By the kernels that AUTOOPT_TRITON=1 turns on."""
    dy, x = torch.randn(4, 64, 14, 14).half(), torch.randn(4, 48, 14, 14).half()
    triton.weight_moments(dy, x, total, (3, 3), (1, 1), (1, 1))
    triton.reduce(torch.randn(4, 70, 50), total)
    triton.position_sums(dy.flatten(2), dy.flatten(2), torch.zeros(64), torch.ones(64), 1, (0, 0, 1))
    assert compiled == ["_weight_moments", "_reduce", "_position_sums"]
