"""The GPU kernels compute what their twins in plain PyTorch compute.

They need Triton, and a GPU or its interpreter (TRITON_INTERPRET=1); benchmarks/moments_gpu.py checks what the rules do
on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoopt.capture import Capture
from autoopt.moments.conv import Conv
from autoopt.moments.linear import sequence_moments
from autoopt.moments.operation import Moments, moments
from equivalence.cases import BATCH_NORM, CONV, LINEAR, NORM, Case, assert_close, network
from interpreter import interpreted
from reference import contributions

pytest.importorskip("triton", reason="the kernels are written in Triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("the kernels need a GPU or Triton's interpreter", allow_module_level=True)

from autoopt.moments import triton

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.usefixtures("interpreted"),
]
__all__ = ["interpreted"]  # a fixture
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last


def assert_same(found: Moments, expected: Moments) -> None:
    for ours, twin in zip(found, expected, strict=True):
        assert ours.shape == twin.shape
        assert (ours.cpu() - twin).abs().max() <= 1e-5 * twin.abs().max()


@pytest.mark.parametrize("total", [False, True], ids=["elementwise", "total"])
@pytest.mark.parametrize(
    ("samples", "positions", "inputs", "outputs"), [(5, 3, 4, 6), (3, 70, 20, 33), (7, 64, 16, 130), (40, 2, 5, 3)]
)
def test_sequences(samples: int, positions: int, inputs: int, outputs: int, total: bool) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(samples, positions, inputs), torch.randn(samples, positions, outputs)
    images = [t.to(DEVICE).mT.unsqueeze(2) for t in (dy, x)]
    gradient, square = triton.weight_moments(*images, total)
    found = Moments(gradient[..., 0, 0], square if total else square[..., 0, 0])
    assert_same(found, sequence_moments(dy, x, total))


CONVOLUTIONS = {
    "plain": Conv((3, 3), (1, 1), (0, 0), (1, 1), 1),
    "padding": Conv((3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stride": Conv((3, 3), (2, 2), (1, 1), (1, 1), 1),
    "1x1": Conv((1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1-stride": Conv((1, 1), (2, 2), (0, 0), (1, 1), 1),
    "1x1-padding": Conv((1, 1), (1, 1), (1, 1), (1, 1), 1),
    "uneven": Conv((3, 2), (2, 1), (1, 2), (1, 2), 1),
    "one-row": Conv((1, 3), (1, 2), (0, 1), (1, 2), 1),
}


@pytest.mark.parametrize("total", [False, True], ids=["elementwise", "total"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, layout: torch.memory_format, total: bool) -> None:
    torch.manual_seed(0)
    conv = CONVOLUTIONS[name]
    x = torch.randn(5, 3, 1 if name == "one-row" else 7, 9)
    dy = torch.randn_like(conv.forward(x, torch.randn(20, 3, *conv.kernel), None)[0])
    images = [t.to(DEVICE).to(memory_format=layout) for t in (dy, x)]
    found = triton.weight_moments(*images, total, conv.kernel, conv.stride, conv.padding, conv.dilation)
    assert_same(found, conv.weight_moments(dy, (x,), total))


def test_gradient_lies_as_the_weight_does() -> None:
    """A channels_last weight gets a channels_last gradient: autograd then takes it without a copy."""
    x, dy = torch.randn(2, 16, 5, 5, device=DEVICE), torch.randn(2, 16, 3, 3, device=DEVICE)
    for layout in (torch.contiguous_format, LAST):
        images = [t.to(memory_format=layout) for t in (dy, x)]
        gradient, square = triton.weight_moments(*images, False, (3, 3))
        assert gradient.is_contiguous(memory_format=layout)
        assert square.is_contiguous()


def norm_case(kind: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int, tuple[int, int, int]]:
    """dy and x (samples, channels, positions), mean, rstd, channels in a group, strides."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, 3, 20, 70).unbind()
    if kind == "batch":
        return dy, x, torch.randn(20), torch.rand(20), 1, (0, 0, 1)
    if kind == "layer":
        return dy.mT.contiguous().mT, x, torch.randn(3, 70), torch.rand(3, 70), 20, (70, 1, 0)
    if kind == "group":
        return dy, x.mT.contiguous().mT, torch.randn(3, 4), torch.rand(3, 4), 5, (4, 0, 1)
    return dy, x, None, torch.rand(3, 70), 20, (70, 1, 0)


@pytest.mark.parametrize("kind", ["batch", "layer", "group", "rms"])
def test_position_sums(kind: str) -> None:
    dy, x, mean, rstd, per_group, strides = norm_case(kind)

    def full(values: Tensor) -> Tensor:
        groups = values.as_strided((3, 20 // per_group, 70), (strides[0], strides[2], strides[1]))
        return groups.repeat_interleave(per_group, 1)

    normal = (x if mean is None else x - full(mean)) * full(rstd)
    moved = [None if t is None else t.to(DEVICE) for t in (dy, x, mean, rstd)]
    found = triton.position_sums(*moved, per_group, strides)
    assert torch.allclose(found.cpu(), (dy * normal).sum(2), atol=1e-4)


@pytest.mark.parametrize("total", [False, True], ids=["elementwise", "total"])
def test_reduce(total: bool) -> None:
    torch.manual_seed(0)
    contributions = torch.randn(7, 33, 50)
    assert_same(triton.reduce(contributions.to(DEVICE), total), moments(contributions, total))


@pytest.mark.skipif(DEVICE == "cuda", reason="float32 is the interpreter's; benchmarks/moments_gpu.py has the rest")
@pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
@pytest.mark.parametrize("case", [*LINEAR, *CONV, *NORM, *BATCH_NORM], ids=str)
def test_rules_that_use_the_kernels(case: Case, elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer whose rule would take a kernel on a GPU, made to take it here."""
    for name in ("linear.in_tiles", "conv.in_tiles", "norm.fused", "product.fused"):
        monkeypatch.setattr(f"autoopt.moments.{name}", lambda _: True)
    monkeypatch.setattr("autoopt.moments.product.BALANCE", 0)
    model, x, y = network(case, torch.float32)
    expected = contributions(model, lambda m: F.cross_entropy(m(x.double()), y))
    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    F.cross_entropy(model(x), y).backward()
    for name, c in expected.items():
        square = c.square().sum(0)
        assert_close(capture.second_moment(name), square if elementwise else square.sum(), 1e-5, name)
        assert_close(model.get_parameter(name).grad, c.sum(0), 1e-5, f"gradient of {name}")


def test_weight_moments_are_one_node_of_a_compiled_graph() -> None:
    x, dy = torch.randn(2, 4, 5, 5, device=DEVICE), torch.randn(2, 6, 3, 3, device=DEVICE)
    expected = triton.weight_moments(dy, x, False, (3, 3))
    compiled = torch.compile(triton.weight_moments, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(dy, x, False, (3, 3)), expected, strict=True):
        assert torch.equal(ours, eager)
