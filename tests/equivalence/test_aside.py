"""Glances beside the backward pass, as while a CUDA graph is recorded. There is no GPU here: streams are stand-ins."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoopt import AutoSGD
from autoopt.capture import Capture, aside, glance, sampled

LAYERS = 11


class Stream:
    """Notes what is done on it, and what it waits for, in the order of the host."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.waited = name, torch.device("cpu"), 0
        self.branches = 0  # recorded on it
        self.after: list[str] = []  # the streams that its branches begin after
        self.joined: list[str] = []  # the streams whose branches it waited for

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other.name)

    def record_event(self) -> tuple[Stream, int]:
        self.branches += 1
        return self, self.branches

    def wait_event(self, event: tuple[Stream, int]) -> None:
        stream, branch = event
        stream.waited = max(stream.waited, branch)
        self.joined.append(stream.name)


class Streams:
    """In the place of torch.cuda's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream("main")
        self.sides: list[Stream] = []
        for name in ("current_stream", "Stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def Stream(self, device: Any) -> Stream:  # noqa: N802
        self.sides.append(Stream(f"side {len(self.sides)}"))
        return self.sides[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def joined(self) -> bool:
        return bool(self.sides) and all(side.waited == side.branches for side in self.sides)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Conv1d(3, 3, 3, padding=1) for _ in range(LAYERS)]).double()


def watched(net: nn.Module, monkeypatch: pytest.MonkeyPatch, elementwise: bool = True) -> Capture:
    monkeypatch.setattr(sampled, "ROOM", 0)
    capture = Capture(net, dict(net.named_parameters()), elementwise=elementwise)
    capture.exact = False
    return capture


def squares(capture: Capture, net: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    capture.clear()
    for x in batches:
        net(x).square().sum().backward()
    found = {name: capture.second_moment(name) for name in capture.parameters}
    return {name: square.clone() for name, square in found.items() if square is not None}


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def test_statistics_are_those_of_the_eager_pass(
    passes: int, elementwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, batches = model(), torch.randn(passes, 4, 3, 6, dtype=torch.float64).unbind()
    capture = watched(net, monkeypatch, elementwise)
    wanted = squares(capture, net, *batches)
    assert len(wanted) == 2 * LAYERS
    streams = Streams(monkeypatch)
    monkeypatch.setattr(glance, "recording", lambda device: True)
    found = squares(capture, net, *batches)
    assert found.keys() == wanted.keys()
    for name, square in wanted.items():
        assert torch.equal(found[name], square), name
    assert streams.joined()
    assert sum(side.branches for side in streams.sides) == passes * -(-LAYERS // aside.PIECES)
    assert all(side.after == ["main"] * side.branches for side in streams.sides), "each begins after the pass so far"


@pytest.mark.parametrize("known", [True, False])
def test_what_is_formed_together_is_formed_beside_the_pass(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as so many layers that are alike are there as in an earlier pass; at its end if there was none."""
    net, x = model(), torch.randn(4, 3, 6, dtype=torch.float64)
    capture = watched(net, monkeypatch)
    if known:
        squares(capture, net, x)
    streams, formed, form = Streams(monkeypatch), [], sampled.Few._at_once

    def noted(few: sampled.Few, entries: list[Any]) -> None:
        formed.append((streams.current.name, len(entries)))
        form(few, entries)

    monkeypatch.setattr(sampled.Few, "_at_once", noted)
    monkeypatch.setattr(glance, "recording", lambda device: True)
    squares(capture, net, x)
    assert formed == [("side 0" if known else "main", LAYERS)]


def test_what_later_work_reads_is_held_until_all_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the pass allocates next would be written over it."""
    Streams(monkeypatch)
    beside, read = aside.Aside(), torch.zeros(1)
    alive = weakref.ref(read)
    for _ in range(20):
        beside.do(lambda: None, torch.zeros(1))
    beside.hold(read)
    del read
    assert alive() is not None
    beside.join()
    assert alive() is None


def test_what_is_read_is_held_until_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: memory must not grow with the depth."""
    streams, beside, done, most = Streams(monkeypatch), aside.Aside(), [], 0
    for number in range(20):
        beside.do(lambda number=number: done.append(number), torch.zeros(1))
        unwaited = sum(side.branches - side.waited for side in streams.sides)
        assert sum(len(branch.pieces) for branch in beside._under_way) == unwaited * aside.PIECES
        most = max(most, unwaited)
    assert most == aside.LAG
    beside.join()
    assert done == list(range(20))
    assert streams.joined()
    assert not beside._under_way


def test_the_work_of_a_failed_pass_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model(), torch.randn(4, 3, 6, dtype=torch.float64)
    capture = watched(net, monkeypatch)
    wanted = squares(capture, net, x)
    Streams(monkeypatch)
    monkeypatch.setattr(glance, "recording", lambda device: True)

    def fail(gradient: Tensor) -> None:
        raise ValueError("on the way")

    def broken(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hook = net[LAYERS - 4].register_forward_hook(broken)
    with pytest.raises(ValueError, match="on the way"):
        squares(capture, net, 2 * x)
    hook.remove()
    for recording in (True, False):
        monkeypatch.setattr(glance, "recording", lambda device, recording=recording: recording)
        net.zero_grad()  # nothing is cleared: that there was a pass which failed is seen from the next one
        net(x).square().sum().backward()
        for name, square in wanted.items():
            assert torch.equal(capture.second_moment(name), square), name  # type: ignore[arg-type]


def test_pieces_of_two_streams_are_two_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins after, and is waited for by, the stream whose tensors it reads."""
    streams, beside = Streams(monkeypatch), aside.Aside()
    other = Stream("other")
    for current in (streams.main, other):
        streams.current = current
        beside.do(lambda: None, torch.zeros(1))
    beside.join()
    assert streams.joined()
    (side,) = streams.sides
    assert side.after == ["main", "other"]
    assert (streams.main.joined, other.joined) == ([side.name], [side.name])


class Recurrent(nn.Module):
    """One layer that is glanced at, above one that goes through the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0])
        return y


@pytest.mark.parametrize("to_none", [True, False])
def test_one_glance_above_other_layers_is_not_lost(to_none: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for another one that does not come, while the layers below enter what they add."""
    monkeypatch.setattr(sampled, "ROOM", 0)
    ends = []
    for recording in (False, True):
        torch.manual_seed(1)
        net, x = Recurrent().double(), torch.randn(4, 5, 3, dtype=torch.float64)
        optimizer = AutoSGD(net)
        if recording:
            Streams(monkeypatch)
            monkeypatch.setattr(glance, "recording", lambda device: True)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            net(x).square().mean().backward()
            optimizer.step()
        ends.append({name: (p.detach().clone(), optimizer.tuned()[name]) for name, p in net.named_parameters()})
    for name, (weight, chosen) in ends[0].items():
        assert torch.equal(ends[1][name][0], weight), name
        assert ends[1][name][1] == chosen, name


def test_a_refusal_ends_the_graph_without_open_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what one sees of it is torch's complaint about these."""
    net, x = model(), torch.randn(4, 3, 6, dtype=torch.float64)
    watched(net, monkeypatch)
    streams = Streams(monkeypatch)
    monkeypatch.setattr(glance, "recording", lambda device: True)
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    first = sum(side.branches for side in streams.sides)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()
    assert first > 0
    assert streams.joined()
