"""Samples that do not lie on the first axis of a layer's input, or take several of its rows each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autoopt.capture import Capture
from equivalence.sharing import D, N, T, TiedTokens, Twice, assert_exact, attach, by_copies, loss_of, one_by_one

K = 4  # rows of one sample, where it has several
both_statistics = pytest.mark.parametrize("elementwise", [True, False], ids=["elementwise", "total"])


def laid_out(model: nn.Module, elementwise: bool, *, axis: int = 0, fold: int = 1) -> Capture:
    capture = attach(model, elementwise)
    for site in capture.sites.values():
        site.axis, site.fold = axis, fold
    return capture


class TimeFirst(nn.Module):
    """Hands (time, batch, ...) to its layers, whatever it is given."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.transpose(0, 1)).transpose(0, 1)
        return result


class Folded(nn.Module):
    """Hands the rows of all samples to its layers, as if each were a sample."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.flatten(0, 1)).unflatten(0, (-1, K))
        return result


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(D, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.RMSNorm(6, eps=1e-5), nn.Linear(6, 2)
    )


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(D, 4, 2), nn.GroupNorm(2, 4), nn.PReLU(4), nn.ConvTranspose2d(4, 2, 2))


SEQUENCES: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether they take tokens
    "layers": (mlp, False),
    "repeated": (lambda: Twice(nn.Linear(D, D)), False),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(D, 5)), False),
    "tokens": (lambda: nn.Sequential(nn.Embedding(7, D, padding_idx=3), nn.Linear(D, 2)), True),
    "tied": (TiedTokens, True),
}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "layers": cnn,
    "repeated": lambda: Twice(nn.Conv2d(D, D, 3, padding=1)),
    "parametrized": lambda: parametrizations.weight_norm(nn.Conv2d(D, 5, 2)),
}


def sequence(tokens: bool, positions: int) -> Tensor:
    return torch.randint(0, 7, (N, positions)) if tokens else torch.randn(N, positions, D, dtype=torch.float64)


@both_statistics
@pytest.mark.parametrize("name", SEQUENCES)
def test_samples_on_the_second_axis(name: str, elementwise: bool) -> None:
    make, tokens = SEQUENCES[name]
    model, x = TimeFirst(make()).double(), sequence(tokens, T)
    expected, output = one_by_one(model, x), model(x)
    capture = laid_out(model, elementwise, axis=1)
    torch.testing.assert_close(model(x), output)
    loss_of(model, x).backward()
    assert_exact(capture, model, expected)


@both_statistics
@pytest.mark.parametrize("name", SEQUENCES)
def test_several_rows_of_a_sequence_are_one_sample(name: str, elementwise: bool) -> None:
    make, tokens = SEQUENCES[name]
    model, x = Folded(make()).double(), sequence(tokens, K)
    expected, output = one_by_one(model, x), model(x)
    capture = laid_out(model, elementwise, fold=K)
    torch.testing.assert_close(model(x), output)
    loss_of(model, x).backward()
    assert_exact(capture, model, expected)


@both_statistics
@pytest.mark.parametrize("name", IMAGES)
def test_several_images_are_one_sample(name: str, elementwise: bool) -> None:
    model, x = Folded(IMAGES[name]()).double(), torch.randn(N, K, D, 5, 6, dtype=torch.float64)
    expected, output = one_by_one(model, x), model(x)
    capture = laid_out(model, elementwise, fold=K)
    torch.testing.assert_close(model(x), output)
    loss_of(model, x).backward()
    assert_exact(capture, model, expected)


@both_statistics
def test_several_rows_of_a_batch_norm_are_one_sample(elementwise: bool) -> None:
    model, x = Folded(nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4))).double(), sequence(False, K)
    rows = by_copies(model.layers, x.flatten(0, 1))
    expected = {f"layers.{name}": c.unflatten(0, (N, K)).sum(1) for name, c in rows.items()}
    capture = laid_out(model, elementwise, fold=K)
    loss_of(model, x).backward()
    assert_exact(capture, model, expected)


def test_a_layer_of_folded_rows_among_layers_of_samples() -> None:
    model = nn.Sequential(nn.Linear(D, D), Folded(nn.Linear(D, D)), nn.Linear(D, D)).double()
    x = sequence(False, K)
    expected = one_by_one(model, x)
    capture = attach(model)
    capture.sites["1.layers"].fold = K
    loss_of(model, x).backward()
    assert_exact(capture, model, expected)


def test_rows_that_are_no_whole_samples_are_refused() -> None:
    model = nn.Linear(D, 2)
    capture = laid_out(model, True, fold=K)
    with pytest.raises(RuntimeError, match="got 7 rows where 4 consecutive ones are one sample"):
        model(torch.randn(7, D))
    capture.detach()
