"""Statistics come of the parameters that a pass adds to, and of no others, whatever of the graph it goes through."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoSGD
from autoopt.capture import Capture, sampled

FIRST, LAST = ["0.weight", "0.bias", "1.weight", "1.bias"], ["3.weight", "3.bias"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers this small looked at by a few samples, too."""
    monkeypatch.setattr(sampled, "ROOM", 0)


class Pair:
    """A model that is observed and the batch of its passes; a twin that is not says what to expect."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)).double()
        self.named = dict(self.model.named_parameters())
        self.x, self.y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6,))
        self.capture = Capture(self.model, self.named, elementwise=True)
        self.capture.exact = False

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def of(self, names: Sequence[str]) -> list[nn.Parameter]:
        return [self.named[name] for name in names]

    def squares(self) -> dict[str, Tensor]:
        """What is known since gradients were cleared; clears both."""
        found = {name: self.capture.second_moment(name) for name in self.named}
        self.model.zero_grad()
        self.capture.clear()
        return {name: square for name, square in found.items() if square is not None}


@pytest.fixture
def pair(few: None) -> Pair:
    pair = Pair()
    for _ in range(2):  # in the first pass layers are compared with their gradients
        pair.loss().backward()
        pair.squares()
    return pair


def whole(pair: Pair) -> dict[str, Tensor]:
    pair.loss().backward()
    return pair.squares()


@pytest.mark.parametrize("names", [FIRST, LAST, ["0.weight"], ["3.bias", "1.weight"]], ids=" ".join)
def test_a_pass_to_some_of_them(pair: Pair, names: list[str]) -> None:
    wanted = whole(pair)
    pair.loss().backward(inputs=pair.of(names))
    found = pair.squares()
    assert found.keys() == set(names)
    assert all(torch.equal(found[name], wanted[name]) for name in names)


def test_two_passes_through_one_graph(pair: Pair) -> None:
    wanted = whole(pair)
    loss = pair.loss()
    loss.backward(inputs=pair.of(LAST), retain_graph=True)
    loss.backward(inputs=pair.of(FIRST))
    found = pair.squares()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_pass_through_layers_that_it_does_not_add_to(pair: Pair) -> None:
    """It goes on to the images, and what it passed serves the next one."""
    wanted = whole(pair)
    pair.x.requires_grad_()
    loss = pair.loss()
    loss.backward(inputs=[*pair.of(LAST), pair.x], retain_graph=True)
    loss.backward(inputs=pair.of(FIRST))
    found = pair.squares()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("names", [FIRST, LAST], ids=" ".join)
def test_gradients_that_are_given_back_count_for_nothing(pair: Pair, names: list[str]) -> None:
    wanted = whole(pair)
    loss = pair.loss()
    torch.autograd.grad(loss, pair.of(names), retain_graph=True)
    torch.autograd.grad(pair.loss(), pair.of(names))
    assert not pair.squares()
    loss.backward()
    found = pair.squares()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_parameter_that_is_frozen_meanwhile(pair: Pair) -> None:
    wanted = whole(pair)
    pair.named["1.weight"].requires_grad_(False)
    pair.loss().backward()
    found = pair.squares()
    assert found.keys() == wanted.keys() - {"1.weight"}
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_parameter_that_is_frozen_for_one_of_several_passes(pair: Pair) -> None:
    """In the middle of it, where autograd is not given to keep what it needs."""
    for freezes in (False, True):
        for name in pair.named:
            with torch.autograd.graph.save_on_cpu():
                loss = pair.loss()
            pair.named[name].requires_grad_(not freezes)
            loss.backward()
            pair.named[name].requires_grad_(True)
            found = pair.capture.second_moment(name)
            assert (found is None) == (pair.named[name].grad is None) == freezes
            pair.squares()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def test_a_layer_that_runs_twice_is_frozen_meanwhile() -> None:
    torch.manual_seed(0)
    model = Twice()
    opt = AutoSGD(model)
    for trains in (True, False):  # from the second pass on it is known to run twice
        opt.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        model.layer.bias.requires_grad_(trains)
        before = copy.deepcopy(model.state_dict())
        loss.backward()
        opt.step()
    assert not torch.equal(model.layer.weight, before["layer.weight"])
    assert torch.equal(model.layer.bias, before["layer.bias"])


def test_gradients_that_a_hook_takes_aside(pair: Pair) -> None:
    """As some do that keep gradients in another precision, or elsewhere."""
    wanted, aside = whole(pair), {}

    def take(parameter: Tensor) -> None:
        aside[parameter], parameter.grad = parameter.grad, None

    for parameter in pair.named.values():
        parameter.register_post_accumulate_grad_hook(take)
    pair.loss().backward()
    found = {name: pair.capture.second_moment(name) for name in pair.named}
    assert len(aside) == len(found)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_passes_that_add_up(pair: Pair) -> None:
    wanted = whole(pair)
    for names in (FIRST, LAST, list(pair.named)):
        pair.loss().backward(inputs=pair.of(names))
    found = pair.squares()
    assert all(torch.equal(found[name], 2 * wanted[name]) for name in wanted)


def test_where_all_samples_are_looked_at_a_pass_to_some_is_refused_in_the_step() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 3))
    opt = AutoSGD(model)
    F.cross_entropy(model(torch.ones(4, 1, 5, 5)), torch.arange(4) % 3).backward(inputs=list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' has a gradient but no statistics.*without inputs="):
        opt.step()
