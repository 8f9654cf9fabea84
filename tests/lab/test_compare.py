"""What `autoopt compare` promises: each peer driven as it asks to be, the price of its step, no failure hidden.

The peers here are fakes in the place of the real packages, so that what is asked of an optimizer can be seen.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plotly.graph_objects import Figure
from test_demo import Page
from torch import nn

from autoopt_lab import cli, compare, step_cost, train
from autoopt_lab.compare import Comparison, Outcome, Plan
from autoopt_lab.memory import Allocated, allocated
from autoopt_lab.peers import METHODS, Training, wanted
from autoopt_lab.report import compare_page
from autoopt_lab.step_cost import Cost
from autoopt_lab.sweep import SweepError
from autoopt_lab.tasks import Data, Task
from autoopt_lab.tasks.digits import task as digits

PEERS = [name for name, method in METHODS.items() if method.package not in ("torch", "autoopt")]

FAKES = {
    "momo": """
import torch

class Momo(torch.optim.SGD):
    def __init__(self, parameters, lr):
        assert lr == 1.0
        super().__init__(parameters, lr=0.01, momentum=0.9)

    def step(self, closure=None, loss=None):
        assert loss.shape == () and loss > 0  # a read
        super().step()
""",
    "schedulefree": """
import torch

class SGDScheduleFree(torch.optim.SGD):
    training = False

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=0.01, momentum=0.9)

    def step(self):
        assert self.training
        super().step()

    def train(self):
        self.training = True
        for weight, kept in getattr(self, "kept", []):
            weight.data.copy_(kept)

    def eval(self):
        self.training = False
        self.kept = [(weight, weight.data.clone()) for weight in self.param_groups[0]["params"]]
        for weight, _ in self.kept:
            weight.data.zero_()
""",
    "dog": """
import copy
import torch

class DoG(torch.optim.SGD):
    def __init__(self, parameters, reps_rel):
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.reps_rel = reps_rel

class PolynomialDecayAverager:
    def __init__(self, model):
        self.averaged_model, self.steps = copy.deepcopy(model), 0

    def step(self):
        self.steps += 1
        for weight in self.averaged_model.parameters():
            weight.data.zero_()
""",
    "prodigyopt": """
import torch

class Prodigy(torch.optim.SGD):
    steps = 0

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=0.01)

    def step(self):
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("no | more\\nof this")
        super().step()
""",
    "dadaptation": """
import torch

class DAdaptAdam(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=float(10**30))
""",
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, source in FAKES.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in FAKES:
        sys.modules.pop(name, None)


PLAN = Plan("digits", epochs=2, batch=64, seeds=(0, 1))


def error_of_zero_weights() -> float:
    data = digits.data()
    return digits.error(torch.zeros(len(data.test_targets), 10), data.test_targets)


def autoopt(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["autoopt", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_a_run_is_the_one_that_autoopt_train_does() -> None:
    ours, found = train.train(digits, train.Setting("auto-sgd", epochs=2), seed=1), compare.train(PLAN, ("auto-sgd", 1))
    assert (found.last, found.averaged) == (ours.test_errors[1:], ours.averaged_errors[1:])
    assert found.advised is found.averaged


def test_the_papers_rule_is_judged_by_its_last_weights() -> None:
    paper, found = (
        train.train(digits, train.Setting("paper-sgd", epochs=2), seed=1),
        compare.train(PLAN, ("paper-sgd", 1)),
    )
    assert (found.last, found.averaged) == (paper.test_errors[1:], [])
    assert found.last != compare.train(PLAN, ("auto-sgd", 1)).last


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ["momo", "schedulefree-sgd", "dog"])
def test_a_peer_gets_what_it_needs_and_is_otherwise_trained_like_any(name: str) -> None:
    """The fakes are plain SGD that insists on its needs: last weights must be SGD's, averaged ones are all zero."""
    plain, run = compare.train(PLAN, ("sgd", 0)), compare.train(PLAN, (name, 0))
    assert run.failure == ""
    assert run.last == plain.last
    assert run.averaged == ([] if name == "momo" else [error_of_zero_weights()] * 2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(inputs))


@pytest.mark.usefixtures("fakes")
def test_batch_norm_gets_the_care_that_the_readmes_ask_for() -> None:
    data = Data(torch.ones(4, 3), torch.zeros(4).long(), torch.ones(4, 3), torch.zeros(4).long())
    task = Task("normed", "", Normed, lambda: data)
    assert Training(task, METHODS["dog"], task.model()).optimizer.reps_rel == 1e-4
    assert Training(digits, METHODS["dog"], digits.model()).optimizer.reps_rel == 1e-6
    training = Training(task, METHODS["schedulefree-sgd"], task.model())
    with training.averaged([torch.full((4, 3), 7.0)] * 99) as model:
        assert model.norm.num_batches_tracked == 50
        assert model.norm.running_mean.tolist() == pytest.approx([7 * (1 - 0.9**50)] * 3)


@pytest.mark.usefixtures("fakes")
def test_an_exception_and_a_divergence_are_results() -> None:
    failed, diverged = (compare.train(PLAN, (name, 0)) for name in ("prodigy", "dadapt-adam"))
    assert (failed.last, failed.failure) == ([], "RuntimeError: no | more")
    assert diverged.failure == ""
    assert math.isnan(diverged.last[-1])


@pytest.mark.usefixtures("fakes")
def test_the_price_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "ROUNDS", 2)
    found = step_cost.costs(digits, ["adamw", "auto-sgd", "momo", "prodigy", "dog"], batch=64)
    weights = sum(weight.nbytes for weight in digits.model().parameters())
    assert list(found) == ["sgd", "adamw", "auto-sgd", "momo", "prodigy", "dog"]
    assert found["sgd"].time == 1
    assert all(cost.time > 0 for name, cost in found.items() if name != "prodigy")
    assert [found[name].reads for name in ("sgd", "adamw", "auto-sgd", "momo")] == [0, 0, 0, 1]
    assert found["prodigy"].failure == "RuntimeError: no | more"
    assert math.isnan(found["prodigy"].time)
    assert found["sgd"].state == weights  # momentum
    assert found["adamw"].state == pytest.approx(2 * weights, rel=0.01)  # two moments, and the counters
    assert found["dog"].state == pytest.approx(2 * weights, rel=0.01)  # momentum and the average
    assert found["auto-sgd"].peak >= found["sgd"].peak > weights


def test_memory_is_what_is_held_at_once_and_what_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def code() -> None:
        torch.zeros(3000)
        torch.zeros(2000)
        kept.append(torch.zeros(1000))

    assert allocated(code) == Allocated(peak=12000, kept=4000)


def test_garbage_of_others_does_not_count() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me, self.tensor = self, torch.zeros(5000)

    def code() -> None:
        gc.collect()
        torch.zeros(1000)

    gc.disable()  # so that the cycle is there until somebody collects it
    try:
        allocated(Cycle)
        found = allocated(code)
    finally:
        gc.enable()
    assert found == Allocated(peak=4000, kept=0)


def comparison() -> Comparison:
    """Two seeds each: fine, better with averaging, one seed failed, one seed diverged."""
    nan = math.nan
    outcomes = [
        Outcome("auto-sgd", 0, [0.5, 0.08], [0.4, 0.03]),
        Outcome("auto-sgd", 1, [0.5, 0.08], [0.4, 0.05]),
        Outcome("dog", 0, [0.5, 0.90], [0.4, 0.01]),
        Outcome("dog", 1, [0.5, 0.90], [0.4, 0.03]),
        Outcome("prodigy", 0, [0.5, 0.001], []),
        Outcome("prodigy", 1, [0.5], [], "RuntimeError: no | more"),
        Outcome("adamw", 0, [0.5, 0.001], []),
        Outcome("adamw", 1, [nan, nan], []),
    ]
    costs = {name: Cost(0.002, 2.0, 300.0, 200.0, 7.0) for name in ("auto-sgd", "dog", "adamw")}
    costs |= {"sgd": Cost(0.001, 1.0, 200.0, 100.0, 0.0), "prodigy": Cost(failure="RuntimeError: no | more")}
    return Comparison(PLAN, "some images", outcomes, costs, weights=100, left_out=["momo"])


def test_rows_are_ranked_by_the_weights_the_authors_advise_and_no_seed_is_averaged_away() -> None:
    rows = comparison().rows
    assert [row.name for row in rows] == ["dog", "auto-sgd", "adamw", "prodigy"]
    assert rows[0].advised.mean == pytest.approx(0.02)
    table = {row.method.label: [text.replace("\N{NO-BREAK SPACE}", " ") for text in compare.shown(row)] for row in rows}
    assert table["DoG"][1:] == ["90.00 ± 0.00 %", "2.00 ± 1.41 %", "2.00×", "1.50×", "2.0", "7", ""]
    assert table["AdamW"][1:3] + table["AdamW"][-1:] == ["diverged", "", "diverged with seed 1"]
    failure = "seed 1: RuntimeError: no | more; measuring a step: RuntimeError: no | more"
    assert table["Prodigy"][1:] == ["failed", "", "–", "–", "–", "–", failure]
    assert compare.verdict(comparison()).replace("\N{NO-BREAK SPACE}", " ") == (
        "Lowest test error of 4: DoG, 2.00 % (averaged weights); AutoSGD 4.00 % (averaged weights), rank 2."
    )


def test_the_page_the_table_and_the_numbers_hold_every_optimizer_and_its_failures(tmp_path: Path) -> None:
    page = compare_page.write(comparison(), tmp_path)
    html = page.read_text()
    shown = Page(html)
    assert shown.loads == []
    assert "default-src 'none'" in html
    assert [row[0].split()[0] for row in shown.rows["compared"][1:]] == ["DoG", "AutoSGD", "AdamW", "Prodigy"]
    assert "no | more" in shown.rows["compared"][-1][-1]
    assert "Left out, because not installed: MoMo (momo-opt)." in html
    curves, prices = (Figure(spec) for spec in shown.figures)  # raises on an unknown property
    assert {line.name: list(line.y) for line in curves.data}["AdamW"] == [None, None]
    assert list(prices.data[0].text) == ["DoG", "AutoSGD"]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 2 + 4
    assert all(line.replace("\\|", "").count("|") == 10 for line in lines)
    numbers = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert [run["failure"] for run in numbers["outcomes"] if run["optimizer"] == "prodigy"] == [
        "",
        "RuntimeError: no | more",
    ]


def test_where_everything_failed_there_is_a_page_all_the_same(tmp_path: Path) -> None:
    runs = [Outcome("auto-sgd", 0, [], [], "ValueError: no")]
    costs = {"sgd": Cost(failure="x"), "auto-sgd": Cost(failure="x")}
    nothing = Comparison(PLAN, "", runs, costs, weights=0, left_out=[])
    compare_page.write(nothing, tmp_path)
    assert compare.verdict(nothing) == "None of the 1 optimizers reached the end."


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("auto-sgd,prodigy", "prodigy needs the package prodigyopt, which is not installed; run: pip install"),
        ("frob", "there is no optimizer 'frob': choose from auto-sgd,"),
    ],
)
def test_a_peer_that_is_not_there_is_one_sentence(
    names: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METHODS, "prodigy", replace(METHODS["prodigy"], module="no_such_module"))
    monkeypatch.chdir(tmp_path)
    assert autoopt(monkeypatch, "compare", "--optimizers", names) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert "frob" in err or "pip install 'autoopt[peers]'" in err
    assert not list(tmp_path.iterdir())


def test_without_a_list_all_that_are_installed_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "prodigy", replace(METHODS["prodigy"], module="no_such_module"))
    chosen, left_out = wanted(None)
    assert {"auto-sgd", "auto-adam", "auto-adagrad", "adamw", "sgd"} <= set(chosen)
    assert "prodigy" in left_out
    assert sorted(chosen + left_out) == sorted(METHODS)
    with pytest.raises(SweepError):
        wanted("")


def test_the_command_compares_on_a_task_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_sweep_report import TASK_FILE

    monkeypatch.setattr(step_cost, "ROUNDS", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one process is enough
    (tmp_path / "mine.py").write_text(TASK_FILE)
    common = ["compare", "--task", f"{tmp_path / 'mine.py'}:task", "--epochs", 2, "--batch", 4, "--seeds", "0:2"]
    assert autoopt(monkeypatch, *common, "--optimizers", "auto-sgd,adamw", "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "AutoSGD" in out
    assert out.splitlines()[-1] == f"Page: {tmp_path / 'out' / 'index.html'}"
    numbers = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(run["optimizer"], run["seed"], len(run["last"])) for run in numbers["outcomes"]].count(
        ("adamw", 1, 2)
    ) == 1
    assert len(numbers["outcomes"]) == 4


def test_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert autoopt(monkeypatch, "compare", "--help") == 0
    assert "autoopt compare " in capsys.readouterr().out.partition("Example")[2]


@pytest.mark.filterwarnings("default")  # what a peer warns of is not our promise
@pytest.mark.parametrize("name", PEERS)
def test_a_real_peer_learns_with_its_recommended_settings(name: str) -> None:
    if not METHODS[name].installed:
        pytest.skip(f"{METHODS[name].package} is not installed (extra autoopt[peers])")
    run = compare.train(Plan("digits", epochs=4, batch=64, seeds=(0,)), (name, 0))
    assert run.failure == ""
    assert len(run.last) == 4
    assert all(map(math.isfinite, run.advised))
    slow = name in ("dog", "ldog")  # their first steps are tiny, by design
    assert slow or run.advised[-1] < 0.5
