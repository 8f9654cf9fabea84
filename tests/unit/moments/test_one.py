"""The kernels for one sample compute what its contribution, formed in float64, says.

They need Triton, and a GPU or its interpreter: where there is no GPU, the tests below run once more in a process of
their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoopt.moments import Operation
from autoopt.moments.conv import Conv
from autoopt.moments.linear import Linear, Transposed
from autoopt.moments.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from interpreter import DEVICE, elsewhere, here, interpreted, run_interpreted

pytest.importorskip("triton", reason="the kernels are written in Triton")
from autoopt.moments import one

__all__ = ["interpreted"]  # a fixture

LAST = torch.channels_last
ROW, SHARE = 2, 5.0


@elsewhere
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def conv(kernel: tuple[int, ...], stride: int = 1, padding: int = 0, dilation: int = 1) -> Conv:
    each = len(kernel)
    return Conv(kernel, (stride,) * each, (padding,) * each, (dilation,) * each, 1)


def batch_norm(channels: int, *, training: bool) -> BatchNorm:
    return BatchNorm(torch.linspace(-1, 1, channels), torch.linspace(1, 2, channels), training, 0.1, 1e-5)


# name -> operation, shape of the input, shapes of weight and bias (None: it has none)
CASES: dict[str, tuple[Operation, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = {
    "linear": (Linear(), (5, 70, 20), (33, 20), (33,)),
    "linear over two axes": (Linear(), (5, 3, 4, 20), (130, 20), (130,)),
    "transposed": (Transposed(), (5, 70, 20), (20, 33), (33,)),
    "conv": (conv((3, 3)), (5, 3, 7, 9), (20, 3, 3, 3), (20,)),
    "conv, padding": (conv((3, 3), padding=1), (5, 20, 7, 9), (8, 20, 3, 3), None),
    "conv, stride": (conv((3, 3), 2, 1), (5, 3, 7, 9), (20, 3, 3, 3), (20,)),
    "conv, dilation": (conv((2, 3), 1, 2, 2), (5, 3, 7, 9), (20, 3, 2, 3), (20,)),
    "conv 1x1": (conv((1, 1)), (5, 3, 7, 9), (20, 3, 1, 1), (20,)),
    "conv 1x1, stride": (conv((1, 1), 2), (5, 3, 7, 9), (20, 3, 1, 1), None),
    "conv 1d": (conv((3,), 2, 1), (5, 3, 41), (20, 3, 3), (20,)),
    "batch norm": (batch_norm(20, training=True), (5, 20, 7, 9), (20,), (20,)),
    "batch norm, evaluation": (batch_norm(20, training=False), (5, 20, 7, 9), (20,), (20,)),
    "group norm": (GroupNorm(4, 1e-5), (5, 20, 7, 9), (20,), (20,)),
    "instance norm": (InstanceNorm(20, 1e-5, None, None, 0.1), (5, 20, 7, 9), (20,), (20,)),
    "layer norm": (LayerNorm((20,), 1e-5), (5, 70, 20), (20,), (20,)),
    "layer norm, two axes": (LayerNorm((4, 20), 1e-5), (5, 70, 4, 20), (4, 20), (4, 20)),
    "rms norm": (RMSNorm((20,), 1e-5), (5, 70, 20), (20,), None),
}
LAYOUTS = ("contiguous", "channels-last")
COPIES = {("linear over two axes", "channels-last")}  # whose positions do not lie at one distance


def use(name: str, dtype: torch.dtype, layout: str) -> tuple[Operation, tuple[Tensor, ...], dict[str, Tensor]]:
    """A layer in the backward pass: the gradient of its output and what it kept, and its parameters."""
    torch.manual_seed(0)
    operation, shape, *sizes = CASES[name]
    x = torch.randn(shape, device=DEVICE)
    parameters = {
        role: torch.randn(size, device=DEVICE)
        for role, size in zip(("weight", "bias"), sizes, strict=True)
        if size is not None
    }
    if layout == "channels-last":
        x = x.to(memory_format=LAST)
        parameters = {r: p.to(memory_format=LAST) if p.dim() == 4 else p for r, p in parameters.items()}
    if dtype != torch.float32 and operation.lowers:
        x, parameters = x.to(dtype), {role: parameter.to(dtype) for role, parameter in parameters.items()}
    y, kept = operation.forward(x, parameters["weight"], parameters.get("bias"))
    dy = torch.randn(y.shape, device=DEVICE).to(y.dtype)
    if layout == "channels-last":
        dy = dy.to(memory_format=LAST)
    return operation, (dy, *kept), parameters


def squares(operation: Operation, tensors: tuple[Tensor, ...], roles: list[str]) -> list[Tensor]:
    """share · c² of the sample, in float64."""
    dy, *kept = (tensor.double() for tensor in tensors)
    row = slice(ROW, ROW + 1)
    parts = operation.select(tuple(kept), row)
    made = {
        "weight": lambda: operation.weight_contributions(dy[row], parts),
        "bias": lambda: operation.bias_contributions(dy[row]),
    }
    return [SHARE * made[role]()[0].square() for role in roles]


@here
def test_one_tensor_as_both_has_no_plan() -> None:
    """Which of them it will be the next time cannot be told."""
    x = torch.randn(5, 70, 20, device=DEVICE)
    assert one.plan(Linear(), (x, x), ROW, SHARE, {"weight": (20, 1)}, None) is None
    assert one.plan(Linear(), (x.clone(), x), ROW, SHARE, {"weight": (20, 1)}, None) is not None


@here
def test_what_32_bits_cannot_reach_has_no_plan() -> None:
    """Positions that lie far apart, as where a view has time last but one of a large batch."""
    dy, near = torch.empty(5, 3, 4, device=DEVICE), torch.empty(5, 3, 4, device="meta")
    far = near.as_strided((5, 3, 4), (4, 1 << 30, 1))
    assert one.plan(Linear(), (dy, near), ROW, SHARE, {"weight": (4, 1)}, None) is not None
    assert one.plan(Linear(), (dy, far), ROW, SHARE, {"weight": (4, 1)}, None) is None


@here
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("total", [False, True], ids=["elementwise", "total"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_one_sample(name: str, layout: str, dtype: torch.dtype, total: bool) -> None:
    if layout == "channels-last" and len(CASES[name][1]) != 4:
        pytest.skip("has no channels to be last")
    operation, tensors, parameters = use(name, dtype, layout)
    for roles in (["weight", "bias"], ["weight"], ["bias"]):
        if not parameters.keys() >= set(roles):
            continue
        strides = {role: parameters[role].stride() for role in roles}
        rows = list(range(1, 1 + len(roles)))
        plan = one.plan(operation, tensors, ROW, SHARE, strides, rows if total else None)
        if (name, layout) in COPIES:
            assert plan is None
            continue
        assert plan is not None
        wanted = squares(operation, tensors, roles)
        for _ in range(2):  # the second time by what the first one chose
            if total:
                table = torch.zeros(4, one.WIDTH, device=DEVICE)
                plan.start(tensors, table, table)
                sums = table.sum(1).unbind()
                assert not any(sums[row] for row in range(4) if row not in rows)
                found = [sums[row] for row in rows]
                wanted_now = [square.sum() for square in wanted]
            else:
                found = [torch.empty_like(parameters[role], dtype=torch.float32) for role in roles]
                plan.start(tensors, found[0], found[-1])
                wanted_now = wanted
            for ours, twin in zip(found, wanted_now, strict=True):
                assert ours.shape == twin.shape
                # products of half precision are exact in float32; sums of 70 of them round
                assert (ours.cpu() - twin.cpu()).abs().max() <= 1e-5 * twin.abs().max()
