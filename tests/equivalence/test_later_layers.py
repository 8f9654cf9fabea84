"""A layer that first runs in a later pass, as with LayerDrop, is seen as it would have been in the first one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoopt.capture import Capture, bare
from equivalence.bare_cases import parameter
from equivalence.by_sample import contributions
from equivalence.cases import assert_close
from equivalence.watching import watched

__all__ = ["watched"]  # a fixture

N, D = 5, 4


class Positions(nn.Module):
    """The same for all samples, wherever it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.runs = nn.Embedding(2 * N, D), False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1])) if self.runs else x


class Token(nn.Module):
    """A parameter that has to be watched, so that later passes watch this part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Block(nn.Module):
    """Positions in a part that another layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.positions, self.linear = nn.LayerNorm(D), Positions(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.positions(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.parts, self.head = nn.Linear(D, D), nn.Sequential(*parts), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.parts(self.first(x))).mean(1))


class WithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.without = Positions(), True

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.without):
            return self.positions(x)


NETS = {
    "nothing was watched": lambda: Net(Positions()),
    "another part was": lambda: Net(Token(), Positions()),
    "its block was quiet": lambda: Net(Token(), Block()),
    "two were watched": lambda: Net(Token(), nn.Sequential(Positions(), Token())),
}


def assert_seen(capture: Capture, model: nn.Module, places: int, run: Any = None) -> None:
    """A pass of the model, or of what runs it, whose statistics are those of each sample alone."""
    x = torch.randn(N, places, D, dtype=torch.float64)
    expected = contributions(model, lambda model: model(x).square().sum(1))
    model.zero_grad()
    capture.clear()
    (model if run is None else run)(x).square().sum(1).mean().backward()
    for name, c in expected.items():
        if c.any() and model.get_parameter(name).requires_grad:
            assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)


def started(model: nn.Module, exact: bool = False) -> tuple[Capture, Positions]:
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    capture.exact = exact
    return capture, next(module for module in model.modules() if isinstance(module, Positions))


more_places = pytest.mark.parametrize("places", [N, N + 2], ids=["as many places as samples", "more places"])


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@more_places
@pytest.mark.parametrize("kind", NETS)
def test_a_layer_that_runs_later(kind: str, places: int, exact: bool) -> None:
    torch.manual_seed(0)
    model = NETS[kind]().double()
    capture, positions = started(model, exact)
    for positions.runs in (False, False, True, False, True, True):
        assert_seen(capture, model, places)


@more_places
def test_a_layer_that_runs_frozen_at_first_and_trains_later(places: int) -> None:
    torch.manual_seed(0)
    model = Net(Positions()).double()
    capture, positions = started(model)
    for positions.runs, trains in ((True, False), (False, True), (True, True), (True, True)):
        positions.table.weight.requires_grad_(trains)
        assert_seen(capture, model, places)


@more_places
def test_a_layer_that_runs_without_gradients_at_first(places: int) -> None:
    torch.manual_seed(0)
    model = Net(WithoutGradients()).double()
    capture, positions = started(model)
    for positions.runs, model.parts[0].without in ((True, True), (True, False), (True, False)):
        assert_seen(capture, model, places)


def test_layers_that_never_run_are_waited_for_in_some_passes(
    watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare, "PATIENCE", 3)
    model = Net(nn.LayerNorm(D)).double()
    model.unused = nn.Linear(D, D).double()
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    for _ in range(8):
        model.zero_grad()
        capture.clear()
        model(torch.randn(N, N, D).double()).sum().backward()
    assert watched == ["Net"] * 3


# Dynamo's own: of tracing any Function, and of looking at tensors between two graphs
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_with_a_parameter_in_one_part_and_positions_in_another() -> None:
    torch.manual_seed(0)
    model = Net(Positions(), Token()).double()
    model.parts[0].runs = True
    capture, _ = started(model)
    compiled = torch.compile(model, backend="eager")
    for places in (N, N, N + 2):
        assert_seen(capture, model, places, compiled)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_in_a_checkpoint_are_no_later_ones(reentrant: bool, watched: list[str]) -> None:
    """They are run again after the pass, and the model need not be watched for that."""
    model = nn.Sequential(nn.Linear(D, D), Checkpointed(nn.Linear(D, D), reentrant), nn.Linear(D, D))
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    for _ in range(3):
        model.zero_grad()
        capture.clear()
        model(torch.randn(N, D)).sum().backward()
    assert len(watched) == 1


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)
