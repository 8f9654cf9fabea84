"""Watching: what loggers get and when, the live table, and that a watched optimizer is otherwise left alone."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import autoopt
from autoopt import AutoAdam, AutoSGD
from autoopt.watching import Logger, TensorBoard, watch
from contract.small import assert_same, batches, mlp, snapshot, train


class Recorder:
    """The protocol, and no more than it."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))


class Closing(Recorder):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_logger_gets_every_parameter_every_so_many_steps() -> None:
    model = mlp()
    optimizer, recorder = AutoAdam(model), Recorder()
    assert isinstance(recorder, Logger)
    with autoopt.watch(optimizer, recorder, every=3, first_step=100):
        train(model, optimizer, batches(8))
    assert [step for step, _ in recorder.points] == [102, 105, 108]
    chosen = optimizer.tuned()["0.weight"]
    assert recorder.points[-1][1]["rate/0.weight"] == chosen.lr
    assert recorder.points[-1][1]["momentum/0.weight"] == chosen.momentum
    assert recorder.points[-1][1]["noise/0.weight"] == chosen.noise
    assert len(recorder.points[-1][1]) == 3 * len(list(model.parameters()))


def test_what_is_not_known_yet_is_not_logged() -> None:
    model = mlp()
    optimizer, recorder = AutoSGD(model), Recorder()
    model[0].requires_grad_(False)
    watch(optimizer, recorder, every=1, batch_size=8)
    optimizer.step()  # without a gradient: nothing is measured
    assert not any(name.startswith(("noise/", "batch/")) for name in recorder.points[0][1])


def test_a_watched_run_is_the_same_run() -> None:
    runs = []
    for watched in (True, False):
        model = mlp()
        optimizer = AutoAdam(model)
        if watched:
            watch(optimizer, Recorder(), every=2, batch_size=8)
        train(model, optimizer, batches(20))
        runs.append(snapshot(model, optimizer))
    assert_same(*runs)


def test_the_device_is_read_once_for_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer, reads = AutoSGD(model), []
    original = AutoSGD.tuned
    monkeypatch.setattr(AutoSGD, "tuned", lambda self: (reads.append(1), original(self))[1])
    with watch(optimizer, Recorder(), Recorder(), every=5, batch_size=8):
        train(model, optimizer, batches(19))
    assert len(reads) == 3


def test_it_ends_when_closed_or_with_the_optimizer() -> None:
    model = mlp()
    optimizer, closing = AutoSGD(model), Closing()
    watcher = watch(optimizer, closing, every=1)
    train(model, optimizer, batches(2))
    watcher.close()
    watcher.close()
    train(model, optimizer, batches(2))
    assert len(closing.points) == 2
    assert closing.closed == 1

    last = Closing()
    watcher = watch(optimizer, last, every=1)  # the watcher itself is kept
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert last.closed == 1


def test_advice_comes_with_the_batch_size() -> None:
    model = mlp()
    optimizer, recorder = AutoSGD(model), Recorder()
    with watch(optimizer, recorder, every=1, batch_size=8) as watcher:
        train(model, optimizer, batches(4))
        assert watcher.advice is None  # from so few
        train(model, optimizer, batches(2))
    assert watcher.advice is not None
    assert recorder.points[-1][1]["batch/size"] == 8
    assert recorder.points[-1][1]["batch/noise_scale"] == watcher.advice.noise_scale


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = mlp()
    optimizer = AutoSGD(model)
    with watch(optimizer, TensorBoard(tmp_path), every=4):
        train(model, optimizer, batches(8))
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    scalars = events.Scalars("rate/3.weight")
    assert [event.step for event in scalars] == [4, 8]
    assert scalars[-1].value == pytest.approx(optimizer.tuned()["3.weight"].lr)


def test_the_live_table_shows_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    consoles = pytest.importorskip("rich.console")
    screen = io.StringIO()
    console = consoles.Console(file=screen, force_terminal=True, width=140)
    monkeypatch.setattr("rich.get_console", lambda: console)
    model = mlp()
    optimizer = AutoSGD(model)
    with watch(optimizer, every=4, batch_size=8):
        train(model, optimizer, batches(20))
    last = screen.getvalue()[screen.getvalue().rindex("step 20") :]
    for name, chosen in optimizer.tuned().items():
        row = next(line for line in last.splitlines() if f" {name} " in line)
        assert f"{chosen.lr:.3g}" in row
        assert f"{min(max(1 - chosen.noise, 0), 1):.0%}" in row
    assert "batch size 8" in last


@pytest.mark.parametrize("with_rich", [True, False], ids=["no terminal", "no rich"])
def test_plain_lines_where_no_table_can_be_drawn(
    with_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    model = mlp()
    optimizer = AutoSGD(model)
    with watch(optimizer, every=2, batch_size=8):
        train(model, optimizer, batches(10))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("step 10  rate ")
    assert "batch size 8" in lines[-1]


def test_the_library_loads_nothing_that_only_watching_needs() -> None:
    optional = "{'rich', 'tensorboard', 'lightning', 'transformers', 'accelerate'}"
    program = f"import autoopt, sys; assert autoopt.watch; print(sorted({optional} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((), {"every": 0}, ValueError, "every is 0"),
        ((), {"batch_size": 1}, ValueError, "batch_size is 1"),
        (("runs/first",), {}, TypeError, r"str is no logger: it needs a method log\(step, values\)"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        watch(AutoSGD(mlp()), *arguments, **options)


def test_other_optimizers_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"SGD has no tuned\(\)"):
        watch(torch.optim.SGD(mlp().parameters()))
