"""What `autoopt paper` promises: the paper's protocol, and its table and figures from stored results alone."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plotly.graph_objects import Figure
from sweep_tools import TASK, manifest, run
from test_demo import Page

from autoopt_lab import cli, pack, paper
from autoopt_lab.names import ALGORITHM_1, COUNTERPARTS, DEFAULT
from autoopt_lab.record import Conditions, Folder, Group, Job, Manifest, Part, RecordError
from autoopt_lab.report import paper_page
from autoopt_lab.results import Results, joined, load
from autoopt_lab.sweep import SweepError, check
from autoopt_lab.table2 import PAPER, cells, markdown, number, table2, verdicts


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one core, "cpu" is this process: no test waits for another to import torch."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def part(jobs: list[Job], error: Callable[[Job], float], epochs: int = 10) -> Part:
    """Jobs of one optimizer, as if they had been run; the train error is 0.9 times the test error, the default rule's
    average 0.8 times.
    """
    final = np.array([error(job) for job in jobs], np.float32)
    names = [name for name, _ in jobs[0].options]
    columns = {
        "task": np.array([job.task for job in jobs]),
        "optimizer": np.array([job.optimizer for job in jobs]),
        "batch": np.array([job.batch for job in jobs], np.int32),
        "seed": np.array([job.seed for job in jobs], np.int32),
        **{name: np.array([dict(job.options)[name] for job in jobs]) for name in names},
        "test_error": np.linspace(np.full(len(jobs), 0.9), final, epochs, axis=1, dtype=np.float32),
        "train_error": 0.9 * final,
        "average_test_error": final * (0.8 if jobs[0].optimizer in DEFAULT else math.nan),
        **dict.fromkeys(("test_loss", "train_loss"), final),
    }
    trace = {}
    if jobs[0].optimizer in COUNTERPARTS:
        value = np.broadcast_to(np.array([0.5, 0.25, 2.0], np.float32)[:, None], (len(jobs), 4, 3, 2))
        step = np.arange(1, 40, 10, dtype=np.int32)
        trace = {"step": step, "tensor": np.array(["0.weight", "0.bias"]), "value": value}
    made = {"time": "now", "hardware": "a GPU", "command": "paper", "autoopt": "1", "torch": "2", "python": "3"}
    return Part(columns, trace, made | {"commit": None})


def results(error: Callable[[Job], float], wanted: Manifest | None = None, seeds: int = 10) -> Results:
    wanted = wanted or paper.protocol()
    groups: dict[str, list[Job]] = {}
    for job in wanted.jobs():
        if job.seed < seeds:
            groups.setdefault(job.optimizer, []).append(job)
    return joined(wanted, [part(jobs, error, wanted.conditions.epochs) for jobs in groups.values()])


def as_published(job: Job) -> float:
    """The paper's mean where its setting was the best, and noise; twice that elsewhere. N = 64 is a little better.

    The default rule is no worse than Algorithm 1.
    """
    if job.optimizer in DEFAULT:
        return as_published(job._replace(optimizer=job.optimizer.replace("auto", "paper")))
    rates = {"mnist": {"sgd": -2, "adam": -3.5, "adagrad": -2}, "cifar10": {"sgd": -1.5, "adam": -3.5, "adagrad": -1.5}}
    options, published = dict(job.options), PAPER[job.task, job.optimizer].test
    momentum = {"mnist": 0.0, "cifar10": 0.99}[job.task] if job.optimizer == "sgd" else options.get("momentum")
    hit = "lr" not in options or math.isclose(options["lr"], 10 ** rates[job.task][job.optimizer])
    factor = 1 if hit and options.get("momentum") == momentum else 2
    return factor * published.mean + (job.seed - 4.5) / 3 * published.deviation + (job.batch != 64) * 1e-4


@pytest.fixture(scope="module")
def published() -> Results:
    return results(as_published)


def test_the_protocol_is_the_papers() -> None:
    wanted = paper.protocol()
    check(wanted)  # the engine knows every optimizer and option
    jobs = wanted.jobs()
    count = Counter((job.task, job.optimizer) for job in jobs)
    for task in ("mnist", "cifar10"):
        assert [count[task, name] for name in ("sgd", "adam", "adagrad")] == [3240, 540, 540]
        assert [count[task, name] for name in (*ALGORITHM_1, *DEFAULT)] == [60] * 6
    assert len(jobs) == 2 * (3240 + 540 + 540 + 360)
    assert all(("smoothing" in dict(job.options)) == (job.optimizer in ALGORITHM_1) for job in jobs)
    adam = [dict(job.options) for job in jobs if job.optimizer == "adam"]
    assert {(options["momentum"], options["beta2"]) for options in adam} == {(0.9, 0.99)}
    assert sorted({options["lr"] for options in adam}) == pytest.approx([10 ** (k / 2) for k in range(-8, 1)])
    assert {job.batch for job in jobs} == {8, 16, 32, 64, 128, 256}
    assert wanted.conditions.epochs == 10


def test_the_small_protocol_is_a_grid_of_six_and_the_three_automatic_optimizers_by_both_rules() -> None:
    jobs = [job for job in paper.small_protocol().jobs() if job.seed == 0]
    assert [job.optimizer for job in jobs] == [*DEFAULT, *ALGORITHM_1, *["sgd"] * 6]
    assert {job.task for job in jobs} == {"mnist"}


@pytest.mark.parametrize(
    ("seeds", "only", "count"),
    [
        (None, [], 9360),
        ("0:3", [], 2808),
        ("9:10", ["mnist/sgd"], 324),
        (None, ["mnist"], 4680),
        ("0:1", ["*/auto-*/128", "cifar10/adam"], 6 + 54),
        ("0:1", ["*/paper-*"], 36),
    ],
)
def test_seeds_and_only_choose(seeds: str | None, only: list[str], count: int) -> None:
    wanted = paper.protocol()
    assert sum(map(paper.chosen(wanted, seeds, only), wanted.jobs())) == count


@pytest.mark.parametrize(("seeds", "only"), [("3", []), ("3:1", []), ("a:b", []), ("-1:2", []), ("10:12", [])])
def test_seeds_that_make_no_sense_are_one_sentence(seeds: str, only: list[str]) -> None:
    with pytest.raises(SweepError, match="seeds"):
        paper.chosen(paper.protocol(), seeds, only)


def test_only_that_matches_nothing_is_one_sentence() -> None:
    with pytest.raises(SweepError, match=r"--only mnist/sdg matches no run: there are mnist/auto-sgd, mnist/auto-adam"):
        paper.chosen(paper.protocol(), None, ["mnist/sdg"])


def test_table_2_takes_the_lowest_mean_test_error_of_the_whole_grid(published: Results) -> None:
    rows = {(row.task, row.label): row for row in table2(published)}
    sgd = rows["cifar10", "SGD"]
    assert (sgd.searched, sgd.left_out) == (324, 0)
    assert sgd.ours.config == "N = 64, rate 10⁻¹·⁵, momentum 0.99"
    assert sgd.ours.test.mean == pytest.approx(0.364, abs=1e-5)
    assert sgd.ours.test.deviation == pytest.approx(0.0085 * np.std(np.arange(10), ddof=1) / 3, rel=1e-3)
    assert rows["mnist", "Adam"].ours.config == "N = 64, rate 10⁻³·⁵, momentum 0.9"
    for name in ("AutoSGD", "AutoSGD by Algorithm 1"):
        assert (rows["mnist", name].searched, rows["mnist", name].ours.batch) == (1, 128)
        assert (rows["mnist", f"{name}, best N"].searched, rows["mnist", f"{name}, best N"].ours.batch) == (6, 64)
    assert len(rows) == 2 * (3 + 12)


def test_the_papers_figures_stand_beside_its_rule_and_the_default_has_its_average(published: Results) -> None:
    rows = {(row.task, row.label): row for row in table2(published)}
    paper_rule, default = rows["mnist", "AutoSGD by Algorithm 1"], rows["mnist", "AutoSGD"]
    assert paper_rule.published is PAPER["mnist", "paper-sgd"]
    assert (paper_rule.ours.averaged, paper_rule.ours.advised) == (None, paper_rule.ours.test)
    assert default.published is None
    assert default.ours.averaged is not None
    assert default.ours.averaged.mean == pytest.approx(0.8 * default.ours.test.mean)
    assert default.ours.advised == default.ours.averaged


def test_the_best_n_of_the_default_rule_is_chosen_by_its_average(published: Results) -> None:
    better = published.columns["average_test_error"] * np.where(published.columns["batch"] == 32, 0.5, 1)
    changed = replace(published, columns={**published.columns, "average_test_error": better})
    best = {row.label: row.ours.batch for row in table2(changed) if row.task == "mnist" and "best N" in row.label}
    assert (best["AutoSGD, best N"], best["AutoSGD by Algorithm 1, best N"]) == (32, 64)


def test_only_what_is_more_than_two_standard_deviations_away_is_remarked_on() -> None:
    def shifted(job: Job) -> float:
        away = {"sgd": 1.9, "adam": 2.1, "adagrad": -2.1}.get(job.optimizer, 0)
        return as_published(job) + (away * PAPER[job.task, job.optimizer].test.deviation if away else 0)

    rows = {(row.task, row.label): row.remark for row in table2(results(shifted))}
    assert "test error" not in rows["cifar10", "SGD"]
    assert "test error 2.1 σ higher" in rows["cifar10", "Adam"]
    assert "test error 2.1 σ lower" in rows["mnist", "AdaGrad"]


def test_a_setting_with_a_diverged_seed_is_never_chosen_and_one_with_fewer_seeds_takes_no_part(
    published: Results,
) -> None:
    def diverging(job: Job) -> float:
        return math.nan if job.batch == 64 and job.seed == 7 else as_published(job)

    row = next(row for row in table2(results(diverging)) if row.label == "SGD")
    assert row.ours.batch != 64
    assert sum(cell.diverged for cell in cells(results(diverging))) == 2 * (54 + 9 + 9 + 6)
    keep = [job.seed < 5 or job.batch != 64 for job in published.jobs]
    fewer = replace(published, columns={name: column[keep] for name, column in published.columns.items()}, traces={})
    row = next(row for row in table2(fewer) if row.label == "SGD")
    assert (row.searched, row.left_out, row.ours.batch == 64) == (270, 54, False)


def test_the_verdict_names_both_errors_and_what_the_search_cost(published: Results) -> None:
    said = [sentence.replace("\N{NO-BREAK SPACE}", " ") for sentence in verdicts(table2(published))]
    assert len(said) == 12
    search = "the best of 324 settings of SGD 1.21 %, found with 3,240 runs."
    assert said[:2] == [
        f"MNIST, AutoSGD: 0.98 % test error without a learning rate (N = 128, averaged weights); {search}",
        f"MNIST, AutoSGD by Algorithm 1: 1.23 % test error without a learning rate (N = 128, last weights); {search}",
    ]


def test_markdown_has_the_papers_figures_beside_ours(published: Results) -> None:
    lines = markdown(table2(published)).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert len(lines) == 2 + 30
    assert len({line.count("|") for line in lines}) == 1
    (line,) = (line for line in lines if line.startswith("| CIFAR-10 | AdaGrad |"))
    assert "| 54 | 38.30 ± 1.32 % |  | 38.30 ± 1.31 % |" in line
    assert "31.40 ± 2.92 %" in line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**-3.5, "10⁻³·⁵"),
        (0.01, "10⁻²"),
        (10**-0.5, "10⁻⁰·⁵"),
        (0.1, "0.1"),
        (1.0, "1"),
        (0.0, "0"),
        (0.99999, "0.99999"),
    ],
)
def test_numbers_are_written_as_in_the_paper(value: float, text: str) -> None:
    assert number(value) == text


def test_the_page_has_the_table_and_every_figure_and_loads_nothing(published: Results) -> None:
    html = paper_page.render(published)
    shown = Page(html)
    assert shown.loads == []
    assert "default-src 'none'" in html
    assert len(shown.rows["table2"]) == 1 + 30
    assert len(shown.rows["settings"]) == 1 + 936
    assert 'rule="robust"' in html
    assert 'rule="paper"' in html
    figures = [Figure(spec) for spec in shown.figures]  # raises on an unknown property
    assert len(figures) == 4 + 3 + 6
    rate, momentum = figures[:2]
    assert [line.name for line in rate.data] == [f"N = {n}" for n in (8, 16, 32, 64, 128, 256)]
    assert {tuple(line.y) for line in rate.data} == {(0.5,) * 4}
    assert {tuple(line.y) for line in momentum.data} == {(0.25,) * 4}
    for scatter in figures[4:]:
        *grid, default, algorithm_1 = scatter.data
        assert len(grid) == 9
        assert algorithm_1.name == f"{default.name} by Algorithm 1"
        assert len(default.x) == len(algorithm_1.x) == 10
    assert sum(len(points.x) for points in figures[4].data) == 540 + 20
    assert len(html) < 9e6


def test_runs_that_diverged_are_counted_and_not_drawn() -> None:
    wanted = paper.small_protocol()
    html = paper_page.render(results(lambda job: math.nan if dict(job.options).get("lr") == 1.0 else 0.02, wanted))
    assert "4 runs diverged and are not drawn" in html
    assert "NaN" not in "".join(re.findall(r'data-figure="[^"]*"', html))


def test_a_small_version_has_nothing_of_the_papers_beside_it() -> None:
    small = results(lambda job: 0.05 + job.seed / 100, paper.small_protocol(), seeds=2)
    assert all(row.published is None and row.remark == "" for row in table2(small))
    html = paper_page.render(small)
    assert "smaller than the paper's" in html
    assert len(Page(html).figures) == 4 + 1 + 3  # Figure 3 has N = 32 alone


def test_text_from_a_folder_is_escaped() -> None:
    small = results(lambda job: 0.05, paper.small_protocol(), seeds=2)
    hostile = replace(small, made=[dict(small.made[0]) | {"command": "<script>alert(1)</script>"}])
    assert "<script>alert(1)" not in paper_page.render(hostile)


# -- packing -------------------------------------------------------------------------------------------------------


def test_packed_results_arrive_whole_in_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "there", manifest(3))
    monkeypatch.setattr(pack, "LARGEST", 35_000)
    files = pack.pack(Folder(tmp_path / "there"), tmp_path / "out")
    assert len(files) > 1
    assert all(file.stat().st_size <= 35_000 for file in files)
    for file in [*files, files[0]]:  # twice does no harm
        pack.unpack(file, Folder(tmp_path / "here"))
    assert load(tmp_path / "here")[0].jobs == load(tmp_path / "there")[0].jobs
    assert run(tmp_path / "here", manifest(3)) == []


def test_a_damaged_pack_is_one_sentence_and_nothing_of_it_is_taken_in(tmp_path: Path) -> None:
    run(tmp_path / "there", manifest(1))
    (file,) = pack.pack(Folder(tmp_path / "there"), tmp_path / "out")
    whole = file.read_bytes()
    with tarfile.open(file) as tar:  # a byte of each member, wherever in the file this machine's names put it
        middles = [entry.offset_data + entry.size // 2 for entry in tar]
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in middles]
    assert len(flipped) > 2
    for damaged in (whole[: len(whole) // 2], *flipped, b"", b"nonsense" * 100):
        file.write_bytes(damaged)
        with pytest.raises(RecordError, match=r"results-0.tar .*pack it again|manifest"):
            pack.unpack(file, Folder(tmp_path / "here"))
    assert not (tmp_path / "here").exists()
    with pytest.raises(RecordError, match=r"none\.tar does not exist"):
        pack.unpack(tmp_path / "none.tar", Folder(tmp_path / "here"))


# -- the commands --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """The protocol, with the tiny task in place of the paper's."""
    groups = tuple(replace(group, task=TASK, batches=(8,), seeds=(0, 1)) for group in paper.small_protocol().groups)
    wanted = Manifest("tiny", Conditions(epochs=1), groups)
    monkeypatch.setattr(paper, "protocol", lambda *_: wanted)
    return wanted


def test_the_plain_command_trains_some_seeds_and_packs_them(
    tiny: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, packed = tmp_path / "run", tmp_path / "packed"
    common = ["--out", str(out), "--device", "cpu", "--pack", str(packed)]
    assert paper.main([*common, "--seeds", "0:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("12 runs to do in")
    assert "M samples/s; " in lines[1]
    assert lines[-2].startswith("12 of 12 runs in")
    assert paper.main([*common, "--minutes", "0"]) == 0
    assert "0 of 12 runs" in capsys.readouterr().out
    with tarfile.open(packed / "results-0.tar") as tar:
        assert len(tar.getnames()) == 2 + len(list((out / "parts").iterdir()))
    assert paper.main(["--out", str(tmp_path / "new"), "--add", str(packed / "results-0.tar"), "--device", "cpu"]) == 0
    assert "12 of 12 runs" in capsys.readouterr().out  # the other seed
    assert load(tmp_path / "new")[0].jobs == sorted(tiny.jobs())


def test_the_plain_command_says_what_is_wrong_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paper.main(["--out", str(tmp_path), "--device", "cpu", "--data", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("autoopt_lab.paper: the data folder ")
    assert err.count("\n") == 1
    assert not list((tmp_path / "parts").iterdir())


def autoopt(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["autoopt", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_autoopt_paper_trains_and_makes_table_and_page_which_can_be_made_again_from_parquet_alone(
    tiny: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert autoopt(monkeypatch, "paper", "--out", tmp_path, "--device", "cpu") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Page: {tmp_path / 'index.html'}"
    page, table = (tmp_path / "index.html").read_bytes(), (tmp_path / "table2.md").read_bytes()
    for path in [*(tmp_path / "parts").iterdir(), tmp_path / "index.html", tmp_path / "table2.md"]:
        path.unlink()
    (tmp_path / "parts").rmdir()
    assert autoopt(monkeypatch, "paper", "--out", tmp_path, "--tables") == 0
    assert ((tmp_path / "index.html").read_bytes(), (tmp_path / "table2.md").read_bytes()) == (page, table)


def test_autoopt_sweep_trains_a_users_own_task_and_shows_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--lr", "0.01,0.1", "--momentum", "0,0.9", "--batch", "8,16", "--epochs", 1, "--device", "cpu"]
    assert autoopt(monkeypatch, "sweep", "--task", TASK, "--optimizer", "sgd", *options, "--out", tmp_path) == 0
    assert "The best of 8 settings" in capsys.readouterr().out
    found = load(tmp_path)[0]
    assert len(found.jobs) == 2 * 2 * 2 * 3
    assert found.manifest.groups[0].seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["paper", "--tables", "--out", "{tmp}"], "holds no results: run train, sweep or paper first"),
        (["paper", "--seeds", "5:2", "--out", "{tmp}"], "FIRST:END"),
        (["paper", "--only", "mnist/sdg", "--out", "{tmp}"], "there are mnist/auto-sgd"),
        (["paper", "--device", "tpu", "--out", "{tmp}"], "there is no device 'tpu' here"),
        (["paper", "--data", "{tmp}/none", "--device", "cpu", "--out", "{tmp}/run"], "does not exist"),
        (["paper", "--add", "{tmp}/none.tar", "--out", "{tmp}/run"], "none.tar does not exist"),
        (["paper", "--only", "foo", "--seeds", "0:2", "--out", "{tmp}"], "--seeds 0:2 --only foo matches no run"),
        (["paper", "--out", "{tmp}/file/run"], "choose a folder"),
        (
            ["sweep", "--task", "minst", "--optimizer", "auto-sgd", "--out", "{tmp}/run", "--device", "cpu"],
            "no task 'minst'",
        ),
        (["sweep", "--task", "mnist", "--optimizer", "sgd"], "sgd needs a learning rate"),
        (["sweep", "--task", "mnist", "--optimizer", "auto-sgd", "--lr", "0.1"], "auto-sgd takes no learning rate"),
        (["sweep", "--task", "mnist", "--optimizer", "sgd", "--lr", "1", "--momentum", "1.5"], "numbers below 1"),
        (["sweep", "--task", "mnist", "--optimizer", "sdg", "--out", "{tmp}/run"], "no optimizer 'sdg'"),
        (["sweep", "--task", "mnist", "--optimizer", "sgd", "--lr", "a,b"], "--lr a,b is not a list of numbers"),
        (["sweep", "--task", "mnist", "--optimizer", "auto-sgd", "--batch", "0"], "whole numbers"),
        (["sweep", "--optimizer", "sgd"], "--task"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    assert autoopt(monkeypatch, *(argument.format(tmp=tmp_path) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("autoopt: ")
    assert says in err
    assert not list(tmp_path.rglob("*.npz"))


def test_what_failed_before_its_first_run_does_not_block_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = ["sweep", "--optimizer", "auto-sgd", "--device", "cpu", "--batch", "8", "--seeds", "0:1", "--out", tmp_path]
    failing = ["--task", "mnist", "--data", tmp_path / "none", "--epochs", 3]
    assert autoopt(monkeypatch, *sweep, *failing) == 2
    assert autoopt(monkeypatch, *sweep, "--task", TASK, "--epochs", 1) == 0
    assert len(load(tmp_path)[0].jobs) == 1


def test_the_version_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert autoopt(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"autoopt {importlib.metadata.version('autoopt')}\n"


def test_training_needs_torch_and_numpy_alone() -> None:
    absent = ["pyarrow", "plotly", "rich", "typer", "jinja2", "sklearn"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import autoopt_lab.paper, autoopt_lab.results"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_manifest_survives_json() -> None:
    wanted = Manifest("m", Conditions(3, average=0.1), (Group("t", "sgd", (8,), ({"lr": 10**-3.5},), (0, 1)),))
    assert Manifest.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted
