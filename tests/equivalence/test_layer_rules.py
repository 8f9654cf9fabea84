"""Second moments, gradients and outputs of every covered layer, against the float64 reference and plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoopt.capture import Capture
from equivalence.cases import CASES, CONV, LINEAR, Case, N, assert_close, network
from reference import contributions, double

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

# torch says so once when "same" needs one more zero on one side; the tests of "same" mean it
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


@pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_moments_equal_the_reference(case: Case, dtype: torch.dtype, reduction: str, elementwise: bool) -> None:
    model, x, y = network(case, dtype)
    exact = x.double() if x.is_floating_point() else x
    expected = contributions(model, lambda m: F.cross_entropy(m(exact), y, reduction=reduction))

    capture = Capture(model, dict(model.named_parameters()), elementwise=elementwise)
    F.cross_entropy(model(x), y, reduction=reduction).backward()

    for name, c in expected.items():
        square = c.square().sum(0)
        square = square if elementwise else square.sum()
        assert_close(capture.second_moment(name), square, TOLERANCE[dtype], name)
        assert capture.samples(name) == N
        assert_close(model.get_parameter(name).grad, c.sum(0), TOLERANCE[dtype], f"gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_else_changes(case: Case, dtype: torch.dtype) -> None:
    """Output, gradients, input gradient and running statistics are those of the plain model."""
    plain, x, y = network(case, dtype)
    model = copy.deepcopy(plain)
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    outputs, inputs = [], []
    for m in (plain, model):
        inputs.append(leaf(x))
        outputs.append(m(inputs[-1]))
        F.cross_entropy(outputs[-1], y).backward()

    assert_close(outputs[1], outputs[0], TOLERANCE[dtype], "output")
    if x.is_floating_point():
        assert_close(inputs[1].grad, inputs[0].grad, TOLERANCE[dtype], "input gradient")
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert_close(model.get_parameter(name).grad, parameter.grad, TOLERANCE[dtype], f"gradient of {name}")
        else:
            assert model.get_parameter(name).grad is None
    for name, buffer in plain.named_buffers():
        assert_close(model.get_buffer(name), buffer, TOLERANCE[dtype], name)
    capture.detach()


@pytest.mark.parametrize("chunk", [1, 100, 1000], ids=lambda size: f"chunk-{size}")
@pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case in LINEAR + CONV and not case.frozen and len(case.shape) > 1], ids=str
)
def test_large_layers_in_chunks(case: Case, elementwise: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule holds the contributions of a few samples at a time; how many does not show."""
    monkeypatch.setattr("autoopt.moments.product.CPU_CHUNK", chunk)
    test_second_moments_equal_the_reference(case, torch.float64, "mean", elementwise)


def test_reference_is_float64_of_the_same_weights() -> None:
    model, x, _ = network(CASES[0], torch.float32)
    assert_close(model(x), double(model)(x.double()), TOLERANCE[torch.float32], "output")
