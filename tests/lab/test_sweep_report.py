"""What `autoopt train` and `autoopt report` promise: any model in a run folder, and one page on any run folder."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from plotly.graph_objects import Figure
from sweep_tools import manifest, run
from test_demo import Page

from autoopt_lab import cli
from autoopt_lab.report import run_page
from autoopt_lab.results import Results, load
from autoopt_lab.single import check_task, load_task
from autoopt_lab.sweep import SweepError

TASK_FILE = """
import torch
from torch import nn
from autoopt_lab.tasks import Data, Task

def data():
    inputs = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    targets = (inputs.sum(1) > 0).long()
    return Data(inputs[:16], targets[:16], inputs[16:], targets[16:])

def model():
    return nn.Linear(5, 2)

def short():
    return Data(*(part[:count] for part, count in zip(vars(data()).values(), (16, 15, 8, 8))))

task = Task("mine", "a line", model, data)
no_data = Task("bad", "", model, lambda: None)
unequal = Task("bad", "", model, short)
wide = Task("bad", "", lambda: nn.Linear(6, 2), data)
flat = Task("bad", "", lambda: nn.Sequential(nn.Linear(5, 2), nn.Flatten(0), nn.Unflatten(0, (1, 4))), data,
            loss=lambda outputs, targets: outputs.sum(), error=lambda outputs, targets: 0.5)
per_sample = Task("bad", "", model, data, loss=lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"))
number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(TASK_FILE)
    return str(path)


def autoopt(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["autoopt", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    run(path, manifest(2))
    return path


def test_a_users_own_model_is_trained_into_a_folder_which_can_be_added_to(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["train", "--task", f"{mine}:task", "--epochs", 3, "--batch", 4, "--out", tmp_path / "run"]
    assert autoopt(monkeypatch, *common, "--seeds", "0:2") == 0
    assert autoopt(monkeypatch, *common, "--optimizer", "adam", "--lr", 0.01) == 0
    assert "The best of 2 settings" in capsys.readouterr().out
    found = load(tmp_path / "run")[0]
    assert [(job.optimizer, job.seed, job.options) for job in found.jobs] == [
        ("adam", 0, (("lr", 0.01),)),
        ("auto-sgd", 0, ()),
        ("auto-sgd", 1, ()),
    ]
    assert found.columns["test_error"].shape == (3, 3)
    assert np.isnan(found.columns["average_test_error"]).tolist() == [True, False, False]  # ours keeps an average
    (family, _) = run_page.families(found)
    assert "averaged weights" in family.verdict
    assert [trace.tensor for trace in found.traces.values()] == [["weight", "bias"]] * 2
    assert autoopt(monkeypatch, "report", tmp_path / "run") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Page: {tmp_path / 'run' / 'report.html'}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_data", "data\\(\\) returned NoneType"),
        ("unequal", "train data has 16 inputs and 15 targets"),
        ("wide", "do not fit its data \\(inputs \\(2, 5\\), targets \\(2,\\)\\)"),
        ("flat", "made 1 outputs of 2 inputs"),
        ("per_sample", "loss has shape \\(2,\\)"),
        ("number", "is int, not an autoopt_lab.tasks.Task"),
        ("missing", "has no 'missing'"),
    ],
)
def test_a_task_whose_parts_do_not_fit_is_one_sentence(name: str, says: str, mine: str) -> None:
    with pytest.raises(SweepError, match=says) as error:
        check_task(load_task(f"{mine}:{name}"), 2)
    assert "\n" not in str(error.value)


def test_a_task_file_that_is_not_there_is_named() -> None:
    with pytest.raises(SweepError, match=r"nowhere\.py does not exist"):
        load_task("nowhere.py:task")


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(SweepError, match="a batch of 100000 does not fit the 1280 training samples"):
        check_task(load_task("digits"), 100_000)


def test_a_task_file_that_fails_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind")
    with pytest.raises(SweepError, match=r"broken.py fails with ModuleNotFoundError: No module named"):
        load_task(f"{tmp_path / 'broken.py'}:task")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--optimizer", "adam"], "adam needs a learning rate: give --lr"),
        (["train", "--lr", "0.1"], "auto-sgd takes no learning rate"),
        (["train", "--optimizer", "adamw", "--lr", "0.1"], "there is no optimizer 'adamw'"),
        (["train", "--task", "digit"], "there is no task 'digit'"),
        (["report", "nowhere"], "holds no results"),
        (["report"], "run"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert autoopt(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["paper", "sweep", "train", "report"])
def test_help_shows_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert autoopt(monkeypatch, command, "--help") == 0
    assert f"autoopt {command} " in capsys.readouterr().out.partition("Example")[2]


def test_the_page_shows_every_setting_curve_and_tensor_and_loads_nothing(tiny: Path) -> None:
    html = run_page.render(load(tiny)[0])
    shown = Page(html)
    assert shown.loads == []
    assert "default-src 'none'" in html
    assert len(shown.rows["settings"]) == 1 + 2 * (4 + 1)
    curves, *choices = (Figure(spec) for spec in shown.figures)  # raises on an unknown property
    assert [line.line.width for line in curves.data].count(3) == 2  # automatic, at two batch sizes
    assert [line.line.dash for line in curves.data].count("dash") == 1
    assert len(curves.data) == 8 + 2
    assert [figure.data[0].type for figure in choices] == ["heatmap", "scatter"] * 3
    assert all(list(figure.data[0].y) == ["0.weight", "0.bias", "4.weight", "4.bias"] for figure in choices[::2])


def test_the_verdict_names_both_errors_and_the_cost_of_the_search(tiny: Path) -> None:
    (family,) = run_page.families(load(tiny)[0])
    best = min(cell.test.mean for cell in family.searched)
    assert f"SGD, best of 8 settings: {100 * best:.2f}" in family.verdict
    assert family.verdict.endswith("cost of the search: 16 runs.")
    assert family.verdict.startswith("tiny_task: AutoSGD by Algorithm 1 ")
    assert "last weights" in family.verdict


def test_a_search_in_which_everything_diverged_has_a_page(tiny: Path) -> None:
    found = load(tiny)[0]
    columns = dict(found.columns)
    for name in ("test_error", "train_error"):
        columns[name] = columns[name] * math.nan
    html = run_page.render(Results(found.manifest, found.made, columns, found.traces))
    assert "best of 8 settings: diverged" in html
    assert len(Page(html).figures) == 7
