"""Layers that are not torch's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autoopt.capture import Capture
from autoopt.moments import linear, prepare_for, register
from autoopt.moments.registry import FOREIGN, RULES


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2 of transformers has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.fixture
def _registered() -> Iterator[None]:
    register(Conv1D, linear.prepare_transposed)
    yield
    del RULES[Conv1D]


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])
@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3), (5, 9, 3)], ids=str)
def test_registered_layer_is_observed(shape: tuple[int, ...], elementwise: bool) -> None:
    layer, x = Conv1D(4, 3).double(), torch.randn(*shape, dtype=torch.float64)
    expected = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    for row in x:
        for name, c in zip(expected, torch.autograd.grad(layer(row).sin().sum(), layer.parameters()), strict=True):
            expected[name] += c.square()
    plain = layer(x)
    capture = Capture(layer, dict(layer.named_parameters()), elementwise=elementwise)
    output = layer(x)
    output.sin().sum().backward()
    assert torch.allclose(output, plain, rtol=1e-12)
    for name, square in expected.items():
        assert torch.allclose(capture.second_moment(name), square if elementwise else square.sum(), rtol=1e-10)


def test_layer_of_a_library_that_is_not_imported_is_known_by_its_full_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_for(Conv1D) is None
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    assert prepare_for(Conv1D) is FOREIGN["transformers.pytorch_utils.Conv1D"]


def test_embedding_bag_that_cannot_be_exact_is_refused() -> None:
    bag = nn.EmbeddingBag(3, 2, mode="max")
    Capture(bag, dict(bag.named_parameters()), elementwise=True)
    with pytest.raises(ValueError, match="mode='sum' or 'mean'"):
        bag(torch.zeros(2, 3, dtype=torch.long))
