"""What a sweep promises: nothing lost, nothing done twice, nothing trusted that is not whole, clear sentences."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import resource
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from sweep_tools import CONDITIONS, TASK, manifest, run

from autoopt_lab import sweep as module
from autoopt_lab.devices import DeviceError, devices
from autoopt_lab.engine import Plan, Run, train
from autoopt_lab.record import Conditions, Folder, Group, Job, Manifest, Part, RecordError, three_digits
from autoopt_lab.results import Results, compact, load
from autoopt_lab.sweep import SweepError, chunks, outstanding, sweep, train_chunk, widest
from autoopt_lab.tasks import digits


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The tiny sweep, never interrupted."""
    path = tmp_path_factory.mktemp("whole")
    run(path, manifest())
    return load(path)[0]


def assert_same(found: Results, expected: Results) -> None:
    assert found.jobs == expected.jobs
    assert list(found.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(found.columns[name], column)
        assert found.columns[name].dtype == column.dtype
    assert found.traces.keys() == expected.traces.keys()
    for job, trace in expected.traces.items():
        assert found.traces[job].tensor == trace.tensor
        np.testing.assert_array_equal(found.traces[job].step, trace.step)
        np.testing.assert_array_equal(found.traces[job].value, trace.value)


def test_a_table_holds_every_run_once_with_its_settings_errors_and_traces(whole: Results) -> None:
    assert whole.jobs == sorted(manifest().jobs())
    assert len(whole.jobs) == 2 * 8 * (4 + 1)
    assert whole.columns["test_error"].shape == (80, 2)
    assert not np.isnan(whole.columns["average_test_error"]).any()
    automatic = whole.columns["optimizer"] == "paper-sgd"
    assert np.array_equal(np.isnan(whole.columns["lr"]), automatic)
    assert np.array_equal(np.isnan(whole.columns["smoothing"]), ~automatic)
    assert {job for job in whole.jobs if job.optimizer == "paper-sgd"} == set(whole.traces)
    trace = whole.traces[Job(TASK, "paper-sgd", 4, (("smoothing", 0.9),), 3)]
    assert trace.tensor == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert trace.value.shape == (len(trace.step), 3, 4) == (16, 3, 4)


def test_a_sweep_killed_twenty_times_ends_like_one_that_was_not(whole: Results, tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_sweep.py")
    killed = subprocess.run([sys.executable, script, tmp_path, "20"], capture_output=True, text=True, timeout=120)
    assert killed.returncode == 0, killed.stderr
    progress = [int(count) for count in killed.stdout.split()]
    assert len(progress) == 20
    assert len(set(progress)) > 3  # it was killed on the way, here and there
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("*.npz")}
    run(tmp_path, manifest())
    parts, damaged = Folder(tmp_path).parts()
    assert not damaged
    assert sum(len(part.jobs()) for part in parts) == len(whole.jobs)  # none lost, none twice
    assert_same(load(tmp_path)[0], whole)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert run(tmp_path, manifest()) == []
    assert not list(tmp_path.rglob("*.tmp"))


def test_several_processes_give_the_same_table(whole: Results, tmp_path: Path) -> None:
    done = run(tmp_path, manifest(), names=("cpu", "cpu"))
    assert sorted(job for chunk in done for job in chunk.jobs) == whole.jobs
    assert_same(load(tmp_path)[0], whole)


def test_some_seeds_now_and_the_others_later(whole: Results, tmp_path: Path) -> None:
    first = run(tmp_path, manifest(), lambda job: job.seed < 3)
    assert {job.seed for chunk in first for job in chunk.jobs} == {0, 1, 2}
    second = run(tmp_path, manifest())
    assert {job.seed for chunk in second for job in chunk.jobs} == {3, 4, 5, 6, 7}
    assert_same(load(tmp_path)[0], whole)


def test_a_folder_can_be_asked_for_more_and_its_manifest_then_holds_all(tmp_path: Path) -> None:
    run(tmp_path, manifest(1))
    more = Manifest("tiny", CONDITIONS, (Group(TASK, "adam", (8,), ({"lr": 0.01},), (0,)),))
    assert sum(len(chunk.jobs) for chunk in run(tmp_path, more)) == 1
    assert set(Folder(tmp_path).manifest().jobs()) == {*manifest(1).jobs(), *more.jobs()} == set(load(tmp_path)[0].jobs)


def test_parquet_gives_back_the_same_table_without_the_parts(whole: Results, tmp_path: Path) -> None:
    run(tmp_path, manifest())
    assert_same(compact(tmp_path), whole)
    for part in (tmp_path / "parts").iterdir():
        part.unlink()
    (tmp_path / "manifest.json").unlink()
    found, sentences = load(tmp_path)
    assert not sentences
    assert_same(found, whole)
    assert found.manifest == manifest()
    with pytest.raises(RecordError, match="a finished table without its parts"):  # or it would be overwritten
        run(tmp_path, manifest())
    assert {made["torch"] for made in found.made} == {made["torch"] for made in whole.made}


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "another file"])
def test_a_damaged_part_is_named_and_its_runs_are_done_again(damage: str, whole: Results, tmp_path: Path) -> None:
    run(tmp_path, manifest())
    victim = sorted((tmp_path / "parts").glob("*.npz"))[3]
    content = bytearray(victim.read_bytes())
    lost = len(Part.from_bytes(bytes(content)).jobs())
    if damage == "one bit":
        content[_within(content)] ^= 1
    victim.write_bytes({"truncated": content[:-40], "empty": b"", "another file": b"PK" * 50}.get(damage, content))
    table, sentences = load(tmp_path)
    assert len(table.jobs) == len(whole.jobs) - lost
    said: list[str] = []
    redone = run(tmp_path, manifest(), say=said.append)
    assert said == sentences
    assert len(said) == 1
    assert str(victim) in said[0]
    assert "\n" not in said[0]
    assert sum(len(chunk.jobs) for chunk in redone) == lost
    assert_same(load(tmp_path)[0], whole)


def _within(archive: bytearray) -> int:
    """Where the numbers of a column lie. Around them are fields, as the time, that nobody reads."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        largest = max(opened.infolist(), key=lambda member: member.compress_size)
    names = int.from_bytes(archive[largest.header_offset + 26 : largest.header_offset + 28], "little")
    more = int.from_bytes(archive[largest.header_offset + 28 : largest.header_offset + 30], "little")
    return largest.header_offset + 30 + names + more + largest.compress_size // 2


def test_a_part_with_a_row_too_few_is_not_trusted() -> None:
    columns = {"task": np.array(["t"]), "seed": np.array([1, 2])}
    with pytest.raises(ValueError, match="digest"):
        Part.from_bytes(Part(columns, {}, {}).to_bytes())


def test_traces_keep_three_digits() -> None:
    values = np.random.default_rng(0).lognormal(0, 9, 1000).astype(np.float32)
    np.testing.assert_allclose(three_digits(values), values, rtol=2.0**-12)
    odd = np.array([0, np.inf, -np.inf, np.nan, 1, -0.25], np.float32)
    np.testing.assert_array_equal(three_digits(odd), odd)


def test_a_manifest_says_what_ran_where_and_by_what(tmp_path: Path) -> None:
    run(tmp_path, manifest(1))
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["format"] == 2
    assert content["conditions"]["epochs"] == 2
    assert content["conditions"]["precision"] == "tf32x3"
    assert {"torch", "autoopt", "python", "hardware", "commit", "command"} <= set(content["made"])
    assert {"torch", "hardware", "seconds"} <= set(Folder(tmp_path).parts()[0][0].made)


def test_a_folder_of_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    run(tmp_path, manifest(1))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7}))
    before = path.read_bytes()
    with pytest.raises(RecordError, match="format 7, and this version knows format 2: choose another"):
        run(tmp_path, manifest(1))
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}'])
def test_a_damaged_manifest_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RecordError, match=r"manifest.json of .* is damaged"):
        run(tmp_path, manifest(1))


def test_other_conditions_are_refused(tmp_path: Path) -> None:
    run(tmp_path, manifest(1))
    with pytest.raises(RecordError, match="epochs 2 where 3 is asked for"):
        run(tmp_path, manifest(1, replace(CONDITIONS, epochs=3)))


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with outstanding(folder, manifest(1), "cpu"), pytest.raises(RecordError, match="another sweep is writing"):
        run(tmp_path, manifest(1))


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match=r"cannot write to .*: choose a folder"):
        run(tmp_path / "file" / "run", manifest(1))


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(tmp_path, manifest(), lambda job: job.seed < 2)

    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with outstanding(Folder(tmp_path), manifest(), "cpu") as todo:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RecordError, match="No space left on device"):
            list(sweep(Folder(tmp_path), todo, CONDITIONS, ["cpu"]))
    parts, damaged = Folder(tmp_path).parts()
    assert (len(parts), damaged) == (len(done), {})
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_file_size_limit_is_one_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with outstanding(Folder(tmp_path), manifest(1), "cpu") as todo:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        try:
            with pytest.raises(RecordError, match="cannot write to"):
                list(sweep(Folder(tmp_path), todo, CONDITIONS, ["cpu"]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "parts").iterdir())


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (Group(TASK, "sdg", (4,), ({},), (0,)), "there is no optimizer 'sdg': choose one of sgd"),
        (Group(TASK, "sgd", (4,), ({"rate": 1.0},), (0,)), "sgd has no option 'rate': it knows lr, momentum"),
        (
            Group("minst", "sgd", (4,), ({},), (0,)),
            "no task 'minst': choose digits, mnist, cifar10 or a Python file",
        ),
        (Group(__file__, "sgd", (4,), ({},), (0,)), "must define NET"),
        (Group(TASK, "sgd", (64,), ({},), (0,)), "a batch of 64 does not fit the 32 training samples"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(group: Group, says: str, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=says):
        run(tmp_path, Manifest("bad", Conditions(epochs=1), (group,)))
    assert not Folder(tmp_path).parts()[0]


def test_an_unknown_device_is_one_sentence() -> None:
    with pytest.raises(DeviceError, match="there is no device 'cuda:99' here: choose from auto, cpu"):
        devices("cuda:99")
    assert set(devices("cpu")) == {"cpu"}


def test_chunks_hold_one_shape_each_and_the_most_telling_come_first() -> None:
    grid = tuple({"lr": 10.0**-k} for k in range(9))
    jobs = Manifest(
        "m", CONDITIONS, tuple(Group("mnist", name, (8, 128, 256), grid, tuple(range(10))) for name in ("sgd", "adam"))
    ).jobs()
    cut = chunks(jobs, lambda batch: widest(batch, "cuda:0") // 2)
    assert sorted(job for chunk in cut for job in chunk) == sorted(jobs)
    assert all(len({job[:3] for job in chunk}) == 1 for chunk in cut)
    assert all(len(chunk) <= widest(chunk[0].batch, "cuda") // 2 for chunk in cut)
    assert [chunk[0].seed for chunk in cut] == sorted(chunk[0].seed for chunk in cut)
    assert [chunk[0].batch for chunk in cut[:2]] == [128, 128]
    assert (widest(8, "cuda:0"), widest(128, "cuda:0"), widest(256, "cuda:0")) == (1024, 128, 64)


def test_time_that_has_run_out_ends_a_sweep_between_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock)
    folder, finished = Folder(tmp_path), []
    with outstanding(folder, manifest(), "cpu") as todo:
        for chunk in sweep(folder, todo, CONDITIONS, ["cpu"], deadline=clock + 50):
            finished.append(chunk)
            clock += 20
    assert [chunk.done for chunk in finished] == [True] * 3
    assert len(folder.parts()[0]) == 3


def test_a_chunk_that_cannot_end_in_time_is_given_up_and_so_are_those_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    epochs = iter(range(1, 10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: start + next(epochs))  # a second passes at every look
    conditions = replace(CONDITIONS, epochs=30)
    folder = Folder(tmp_path)
    with outstanding(folder, manifest(2, conditions), "cpu") as todo:
        finished = list(sweep(folder, todo, conditions, ["cpu"], deadline=start + 20))
    assert finished
    assert not any(chunk.done for chunk in finished)
    assert len(finished) == len({chunk.jobs[0][:3] for chunk in finished})
    assert math.isfinite(sum(chunk.seconds for chunk in finished))
    assert not folder.parts()[0]


def test_one_slow_epoch_gives_no_chunk_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other chunks share the device; when they have ended, the rest goes faster."""
    clock = iter([0.0, 50.0, 52.0, 72.0])  # the start, and the ends of three epochs of ten
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))

    def three_epochs(*_: Any, on_epoch: Any, **__: Any) -> None:
        for epoch in (1, 2, 3):
            on_epoch(epoch)
        raise KeyboardInterrupt  # enough seen

    monkeypatch.setattr(module, "train", three_epochs)
    with pytest.raises(KeyboardInterrupt):
        train_chunk(manifest().jobs()[:1], replace(CONDITIONS, epochs=10), None, deadline=120)


def test_the_digits_net_of_a_sweep_trains_like_the_model_of_the_demo() -> None:
    """Whole batches, so that the order of the images does not matter."""
    data, plan = digits.data(), Plan("sgd", batch=digits.TRAIN, epochs=3)
    (found,) = train(digits.NET, data, plan, [Run(2, {"lr": 0.1})], dtype=torch.float64)
    torch.manual_seed(2)
    model = digits.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        digits.task.loss(model(data.train_inputs.double()), data.train_targets).backward()
        optimizer.step()
    own = dict(zip(digits.NET.names, model.state_dict().values(), strict=True))
    torch.testing.assert_close(found.weights, digits.NET.pack(own), rtol=1e-9, atol=1e-12)
    assert found.test_error[-1] == digits.task.error(model(data.test_inputs.double()), data.test_targets)
