"""Of a model that has to be watched later passes watch the one part in which all of that was seen, and lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoopt.capture import Capture, bare
from equivalence.bare_cases import parameter
from equivalence.by_sample import contributions
from equivalence.cases import assert_close
from equivalence.watching import watched

__all__ = ["watched"]  # a fixture

N, T, D = 5, 3, 4


class Embed(nn.Module):
    """A vision transformer's: patches behind a class token, and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token, self.positions = nn.Linear(D, D), parameter(1, 1, D), parameter(1, T + 1, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), 1, D), self.patches(x)], 1) + self.positions


class Keeping(Embed):
    """Leaves behind what it computes from a parameter, on request for each sample."""

    def __init__(self, each: bool = False) -> None:
        super().__init__()
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        self.start = self.token[0].expand(len(x), D) * 2 if self.each else self.token * 2
        return super().forward(x)


class Indexed(Embed):
    """The positions, from a table, of those that it is given, which are the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(T + 1, D)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return super().forward(x) + self.table(places)


class Vision(nn.Module):
    """A block and a head behind them."""

    def __init__(self, embed: nn.Module, scaled: bool = False) -> None:
        super().__init__()
        self.embed, self.block, self.head = embed, nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), nn.Linear(D, 2)
        self.scale, self.skips = nn.ParameterList([parameter(D)] if scaled else []), False

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        h = self.block(self.embed(x, torch.arange(T + 1)) if isinstance(self.embed, Indexed) else self.embed(x))
        if isinstance(self.embed, Keeping):
            h = h + vars(self.embed).pop("start")
        for scale in () if self.skips else self.scale:
            h = h * scale
        return self.head((h.tanh() * self.embed.positions if again else h.tanh()).mean(1))


class Recurrent(nn.Module):
    """A layer that is given a state, which is computed from a parameter elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = Keeping(each=True), nn.GRUCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.cell(h.mean(1), vars(self.embed).pop("start"))


class Worded(nn.Module):
    """A model whose blocks are told a word, with parameters at both ends that lie in no one part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.scale = Embed(), Told(), parameter(D)

    def forward(self, x: Tensor, word: str) -> Tensor:
        return (self.block(self.embed(x), word) * self.scale).mean(1)


class Told(nn.Linear):
    """Does with a word what a model does with the name of a data set."""

    def __init__(self) -> None:
        super().__init__(D, D)

    def forward(self, x: Tensor, word: str = "") -> Tensor:
        return super().forward(x).tanh()


def observing(model: nn.Module, exact: bool = False) -> Capture:
    capture = Capture(model, dict(model.named_parameters()), elementwise=True)
    capture.exact = exact
    return capture


def assert_seen(capture: Capture, model: nn.Module, samples: int = N, **flags: Any) -> None:
    """A pass, whose statistics are those of each sample alone."""
    x = torch.randn(samples, T, D, dtype=torch.float64)
    expected = contributions(model, lambda model: model(x, **flags).square().sum(1))
    model.zero_grad()
    capture.clear()
    model(x, **flags).square().sum(1).mean().backward()
    for name, c in expected.items():
        if not c.any():  # not used
            continue
        assert_close(capture.second_moment(name), c.square().sum(0), 1e-10, name)
        assert capture.samples(name) == samples


def test_later_passes_watch_the_part(watched: list[str]) -> None:
    """Whatever the number of samples, that of the places among them."""
    model = Vision(Embed()).double()
    capture = observing(model)
    for samples in (N, N, T + 1, 1, N):
        assert_seen(capture, model, samples)
    assert watched == ["Vision"] + 4 * ["embed"]


def test_passes_of_another_kind_watch_the_whole(watched: list[str]) -> None:
    """Those with other flags, and what is thawed on the way."""
    model = Vision(Embed()).double()
    capture = observing(model)
    for again in (False, True, True, False):
        assert_seen(capture, model, again=again)
    assert watched == ["Vision", "Vision", "Vision", "embed"]
    for trains in (False, True):
        model.embed.token.requires_grad_(trains)
        for _ in range(2):
            assert_seen(capture, model)
    assert watched[4:] == ["Vision", "embed"] * 2


@pytest.mark.parametrize(
    "make",
    [lambda: Vision(Keeping()), lambda: Vision(Indexed()), Recurrent],
    ids=["left behind", "the same for all", "a state"],
)
def test_where_the_part_is_not_all_the_whole_is_watched(make: Callable[[], nn.Module], watched: list[str]) -> None:
    model = make().double()
    capture = observing(model)
    for samples in (N, N, T + 1):
        assert_seen(capture, model, samples)
    assert set(watched) == {type(model).__name__}


def test_a_parameter_of_others_may_be_used_later(watched: list[str]) -> None:
    model = Vision(Embed(), scaled=True).double()
    capture = observing(model)
    for model.skips in (True, False):
        assert_seen(capture, model)
    assert watched == ["Vision", "Vision"]


def test_a_part_that_was_replaced_is_not_waited_for(watched: list[str]) -> None:
    """It holds parameters, but the model does not hold it any more."""
    model = Vision(Embed()).double()
    capture = observing(model)
    model.embed = Embed().double()
    capture.add(dict(model.embed.named_parameters(prefix="embed")))
    for _ in range(3):
        assert_seen(capture, model)
    assert watched == ["Vision", "embed", "embed"]


def test_of_ever_new_kinds_of_calls_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are watched as the first ones were."""
    monkeypatch.setattr(bare, "KINDS", 3)
    model = Worded().double()
    capture = observing(model)
    for number in range(8):
        assert_seen(capture, model, word=f"a word {number}")
        assert_seen(capture, model, word=f"a word {number}")
    for memory in (capture.bare._quiet, capture.bare._looked, capture.bare._whole):
        assert 0 < len(memory) <= 3


def test_exact_statistics_watch_the_whole(watched: list[str]) -> None:
    model = Vision(Embed()).double()
    capture = observing(model, exact=True)
    for _ in range(2):
        assert_seen(capture, model)
    assert watched == ["Vision", "Vision"]
