"""recorded(step, opt) is the step. The graphs are played here; benchmarks/gpu_check.py has a GPU run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoopt
from autoopt import AutoAdam, AutoSGD
from autoopt.recording import EAGER, KINDS, Graph, Recorder
from contract.small import assert_same, batches, every_optimizer, mlp, snapshot, train


class Played(Graph):
    """As a graph: reads and writes the memory that it was recorded with, and nothing else is done again."""

    def __init__(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], player: Recorder) -> None:
        self.inputs = [x.clone() for x in inputs]
        self.step, self.outputs, self.replays, self.player = step, None, 0, player

    def replay(self, inputs: list[Tensor]) -> Any:
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        self.replays += 1
        with self.player._without_hooks():
            self.outputs = self.step(self.inputs)
        return pytree.tree_map_only(Tensor, torch.clone, self.outputs)


class Player(Recorder):
    """A recorder whose graphs are played."""

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _aside(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], device: torch.device) -> Any:
        return step(inputs)

    def _record(self, step: Callable[[list[Tensor]], Any], inputs: list[Tensor], device: torch.device) -> Graph:
        return Played(step, inputs, self)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self(args, kwargs)

    @property
    def replays(self) -> list[int]:
        """Of each kind of step that is known."""
        return [known.graph.replays if isinstance(known.graph, Played) else 0 for known in self.known]


def made(make: Any = AutoSGD, **options: Any) -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    model = mlp()
    optimizer = make(model, **options)

    def step(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        loss = scale * F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


@every_optimizer
def test_is_the_step_on_a_cpu(make: Any) -> None:
    data = batches(6)
    model, optimizer, step = made(make)
    run = autoopt.recorded(step, optimizer)
    losses = [run(x, y) for x, y in data]
    plain = mlp()
    other = make(plain)
    train(plain, other, data)
    assert_same(snapshot(model, optimizer), snapshot(plain, other))
    assert not any(loss.requires_grad for loss in losses)


@every_optimizer
def test_a_graph_serves_all_calls_of_a_kind(make: Any) -> None:
    data = [*batches(8), *batches(2, samples=5), *batches(2)]
    model, optimizer, step = made(make)
    player = Player(step, optimizer)
    for x, y in data:
        player.run(x, y)
    plain = mlp()
    other = make(plain)
    train(plain, other, data)
    assert_same(snapshot(model, optimizer), snapshot(plain, other))
    assert player.replays == [10 - EAGER, 0]


def test_what_is_returned_stays() -> None:
    _, optimizer, step = made()
    player = Player(lambda x, y: {"loss": step(x, y), "count": len(x)}, optimizer)
    found = [player.run(x, y) for x, y in batches(EAGER + 3)]
    values = [one["loss"].item() for one in found]
    assert len(set(values)) == len(values)
    assert {one["count"] for one in found} == {8}


def test_another_number_option_or_frozen_parameter_is_another_step() -> None:
    model, optimizer, step = made()
    player, (x, y) = Player(step, optimizer), batches(1)[0]

    def calls() -> int:
        before = len(player.known)
        player.run(x, y)
        return len(player.known) - before

    assert [calls(), calls()] == [1, 0]
    optimizer.param_groups[0]["lr"] = 0.5
    assert [calls(), calls()] == [1, 0]
    next(model.parameters()).requires_grad_(False)
    assert [calls(), calls()] == [1, 0]
    next(model.parameters()).requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 1.0
    assert calls() == 0  # known from before
    player.run(x, y, scale=2.0)
    assert len(player.known) == 4


def test_another_mode_is_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = made()
    player, (x, y) = Player(step, optimizer), batches(1)[0]
    player.run(x, y)
    model.eval()
    player.run(x, y)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    player.run(x, y)
    assert len(player.known) == 3
    monkeypatch.undo()
    model.train()
    player.run(x, y)
    assert [known.calls for known in player.known] == [2, 1, 1]


def test_hooks_after_the_step_run_once_for_each_call() -> None:
    _, optimizer, step = made()
    player, (x, y) = Player(step, optimizer), batches(1)[0]
    rates: list[float] = []
    optimizer.register_step_post_hook(lambda opt, *_: rates.append(opt.tuned()["0.weight"].lr))
    for _ in range(EAGER + 4):
        player.run(x, y)
    assert player.replays == [4]
    assert len(set(rates)) == len(rates) == EAGER + 4


def test_few_kinds_are_remembered() -> None:
    _, optimizer, step = made()
    player, (x, y) = Player(step, optimizer), batches(1)[0]
    for number in range(2 * KINDS):
        player.run(x, y, scale=1.0 + number)
    assert len(player.known) == KINDS
    assert player.known[-1].kind.arguments[-1] == (float, 2.0 * KINDS)


def test_a_loaded_state_is_not_that_of_the_graphs() -> None:
    _, optimizer, step = made()
    player, (x, y) = Player(step, optimizer), batches(1)[0]
    for _ in range(EAGER + 2):
        player.run(x, y)
    assert player.replays == [2]
    optimizer.load_state_dict(optimizer.state_dict())
    player.run(x, y)
    assert player.replays == [0]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda step, _: lambda *a: (step(*a), step(*a)), RuntimeError, "called it 2 times"),
        (lambda _, opt: lambda x, y: None, RuntimeError, "called it 0 times"),
    ],
    ids=["two steps", "no step"],
)
def test_refuses_what_is_no_training_step(change: Any, error: type[Exception], words: str) -> None:
    _, optimizer, step = made()
    with pytest.raises(error, match=words):
        autoopt.recorded(change(step, optimizer), optimizer)(*batches(1)[0])


def test_refuses_what_a_graph_cannot_be_given() -> None:
    _, optimizer, step = made()
    with pytest.raises(TypeError, match="given object"):
        Player(step, optimizer).run(object())
    with pytest.raises(TypeError, match="one of this library's optimizers, not SGD"):
        autoopt.recorded(step, torch.optim.SGD(mlp().parameters(), lr=0.1))  # type: ignore[arg-type]


def test_refuses_steps_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, step = made(AutoAdam, measure_every=4)
    monkeypatch.setattr(Tensor, "device", torch.device("cuda"))  # as if all were there
    with pytest.raises(RuntimeError, match="leave the option out"):
        Recorder(step, optimizer)._device()
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="hooks that run before"):
        Recorder(step, optimizer)._device()
