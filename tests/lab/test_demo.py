"""What `autoopt demo` promises: an honest verdict, one page that needs nothing else, runs that repeat, clear errors."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from plotly.graph_objects import Figure
from torch import nn

from autoopt_lab import cli
from autoopt_lab.demo import RATES, percent, settings, table, verdict
from autoopt_lab.names import DEFAULT, label
from autoopt_lab.report.page import Report, render
from autoopt_lab.tasks import Data, Task
from autoopt_lab.tasks.digits import task
from autoopt_lab.train import Run, Setting, Trace, train

IMAGE = 1 / 517


def run(setting: Setting, errors: list[float], seed: int = 0) -> Run:
    """The errors are of the weights to evaluate: of an automatic optimizer's average, whose last weights do worse."""
    tensor = Trace(step=[1, 5], lr=[0.5, 0.25], momentum=[0.0, 0.5], noise=[1.0, 2.0])
    if setting.lr is not None:
        return Run("digits", setting, seed, errors, [], errors[-1], {}, seconds=1.0)
    traces, last = {"conv1.weight": tensor, "conv1.bias": tensor}, [min(1.0, 1.5 * error) for error in errors]
    return Run("digits", setting, seed, last, errors, errors[-1], traces, seconds=1.0)


def runs(auto: float, best: float, others: float) -> list[Run]:
    """Every optimizer alike: the grid's rate 0.01 ends at `best`, its other rates at `others`."""
    ends = {None: auto, 0.01: best}
    return [run(setting, [0.9, ends.get(setting.lr, others)]) for setting in settings(epochs=1)]


class Page(HTMLParser):
    """Everything the page would load, its figures, the cells of its tables and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.figures: list[dict[str, object]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self._open, self._table = [""], ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self._open.append(tag)
        self.loads += [
            f"{tag} {name}={value}" for name, value in attributes if name in {"src", "href", "srcset", "data"}
        ]
        if "data-figure" in values:
            self.figures.append(json.loads(values["data-figure"] or "", parse_constant=pytest.fail))
        if tag == "table":
            self._table = values["id"] or ""
            self.rows[self._table] = []
        if tag == "tr":
            self.rows[self._table].append([])
        if tag in {"td", "th"}:
            self.rows[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "td" in self._open or "th" in self._open:
            self.rows[self._table][-1][-1] += " ".join(data.split()) and data.strip() + " "


def page(runs: list[Run]) -> Page:
    return Page(render(Report(task, runs, workers=2, seconds=1.0)))


BEST = "the best of 9 rates for SGD (2.00 %)"


@pytest.mark.parametrize(
    ("auto", "best", "others", "says"),
    [
        (0.010, 0.020, 0.30, f"better than {BEST}"),
        (0.020 - IMAGE, 0.020, 0.30, f"level with {BEST}"),
        (0.020 + IMAGE, 0.020, 0.30, f"level with {BEST}"),
        (0.025, 0.020, 0.30, f"worse than {BEST} but better than the median rate (30.00 %)"),
        (0.400, 0.020, 0.30, f"worse than {BEST} and no better than the median rate (30.00 %)"),
        (0.400, 0.020, math.nan, f"worse than {BEST} but better than the median rate (diverged)"),
        (math.nan, 0.02, 0.30, f"AutoSGD diverged, {BEST} did not"),
        (0.020, math.nan, math.nan, "AutoSGD 2.00 %, all 9 rates for SGD diverged"),
    ],
)
def test_the_verdict_says_what_the_errors_show(auto: float, best: float, others: float, says: str) -> None:
    sentence = verdict(table(runs(auto, best, others)), level=IMAGE).replace("\N{NO-BREAK SPACE}", " ")
    assert says in sentence
    assert sentence.endswith(".")
    assert "of the averaged weights" in sentence
    assert all(sentence.count(label(name)) == 1 for name in DEFAULT)
    assert sum(sentence.count(word) for word in ("better than the best", "level with", "worse than")) in {0, 3}


def test_a_row_holds_best_median_and_worst_of_the_grid_with_a_diverged_rate_as_the_worst() -> None:
    ends = dict(zip(RATES, [0.9, 0.5, 0.3, 0.1, 0.02, 0.04, 0.6, math.nan, 0.7], strict=True))
    row = table([run(setting, [ends.get(setting.lr or 0, 0.03)]) for setting in settings(epochs=1)])[0]
    assert (row.auto.error, row.best.error, row.median.error) == (0.03, 0.02, 0.5)
    assert (row.auto.last, row.best.last) == (pytest.approx(0.045), 0.02)
    assert row.best.setting.lr == pytest.approx(0.01)
    assert math.isnan(row.worst.error)
    assert row.worst.setting.lr == pytest.approx(10**-0.5)


def test_an_error_is_the_mean_over_the_seeds_and_one_diverged_seed_is_not_averaged_away() -> None:
    three = [run(setting, [0.01 * (1 + seed)], seed) for setting in settings(epochs=1) for seed in range(3)]
    assert table(three)[0].auto.error == pytest.approx(0.02)
    assert (table(three)[0].auto.lowest, table(three)[0].auto.highest) == (0.01, 0.03)
    one_diverged = [run(r.setting, [math.inf if r.seed == 1 else 0.01], r.seed) for r in three]
    assert math.isnan(table(one_diverged)[0].auto.error)
    assert percent(table(one_diverged)[0].auto.error) == "diverged"


def test_the_page_loads_nothing_from_anywhere() -> None:
    html = render(Report(task, runs(0.01, 0.02, 0.3), workers=2, seconds=1.0))
    assert Page(html).loads == []
    assert "default-src 'none'" in html  # and the browser is told to refuse what a script might ask for
    styles = "".join(re.findall(r"<style>.*?</style>", html, re.DOTALL))
    assert "url(" not in styles
    assert "@import" not in styles


def test_the_page_holds_every_run_and_shows_divergence_as_such() -> None:
    done = [run(setting, [0.9, 0.1]) for setting in settings(epochs=1)]
    done[-1] = run(done[-1].setting, [0.9, math.nan])
    shown = page(done)
    rows = [[cell.strip() for cell in row] for row in shown.rows["runs"][1:]]
    expected = {
        (
            label(r.setting.optimizer),
            "auto" if r.setting.lr is None else f"{r.setting.lr:.2g}",
            percent(r.test_error),
            percent(r.averaged_errors[-1]) if r.averaged_errors else "",
        )
        for r in done
    }
    assert {(optimizer, rate, *errors) for optimizer, rate, _, _, *errors, _ in rows} == expected
    assert len(rows) == len(done) == 30
    summary = [[cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in shown.rows["summary"]]
    assert summary[0][1:3] == ["Auto, averaged", "Auto, last weights"]
    assert summary[1][1:3] == ["10.00 %", "15.00 %"]
    assert [row[5] for row in shown.rows["summary"][1:]][-1].startswith("diverged at rate 1")


def test_the_figures_are_valid_plotly_with_one_bold_curve_and_every_tensor() -> None:
    drawn = [Figure(spec) for spec in page(runs(0.01, 0.02, math.nan)).figures]  # raises on an unknown property
    curves, choices = drawn[:3], drawn[3:]
    assert [[line.line.width for line in f.data].count(4) for f in curves] == [1, 1, 1]
    assert all(len(f.data) == 2 + len(RATES) for f in curves)
    assert [tuple(line.y) for line in curves[0].data[-2:]] == [(1.0, 0.015), (0.9, 0.01)]  # last and averaged weights
    assert all([line.name for line in f.data] == ["conv1.weight", "conv1.bias"] for f in choices)
    assert [tuple(f.data[0].y) for f in choices] == [(0.5, 0.25), (0.0, 0.5)] * 3


def test_text_of_a_task_is_escaped() -> None:
    hostile = type(task)("x", "<script>alert(1)</script>", task.model, task.data)
    html = render(Report(hostile, runs(0.01, 0.02, 0.3), workers=2, seconds=1.0))
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html


@pytest.mark.parametrize("setting", [Setting("auto-sgd", 1), Setting("paper-adam", 1), Setting("adam", 1, 0.01)])
def test_a_run_is_a_pure_function_of_task_setting_and_seed(setting: Setting) -> None:
    first = train(task, setting, seed=3)
    torch.rand(7)  # whatever else used the global generator
    state = torch.get_rng_state()
    assert train(task, setting, seed=3) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert train(task, setting, seed=4) != first


def test_all_optimizers_start_from_the_same_weights_and_learn() -> None:
    fast = [Setting("auto-sgd", 5), Setting("paper-sgd", 5), Setting("sgd", 5, 0.3), Setting("adam", 5, 0.01)]
    done = [train(task, setting, seed=0) for setting in fast]
    assert len({r.test_errors[0] for r in done}) == 1
    assert all(len(r.test_errors) == 6 and r.test_error < 0.5 for r in done)
    assert [len(r.averaged_errors) for r in done] == [6, 0, 0, 0]


def test_the_default_rule_is_evaluated_by_its_average_too() -> None:
    """Labels without sense: the weights walk about, and their average does not follow every step of theirs."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(256, 5, generator=generator), torch.randint(2, (256,), generator=generator)
    data = Data(inputs[:128], targets[:128], inputs[128:], targets[128:])
    done = train(Task("noise", "", lambda: nn.Linear(5, 2), lambda: data), Setting("auto-sgd", 20, None, 16), seed=0)
    assert done.averaged_errors[0] == done.test_errors[0]
    assert done.advised_errors == done.averaged_errors != done.test_errors


def test_a_run_that_diverges_ends_in_nan() -> None:
    assert math.isnan(train(task, Setting("sgd", 1, 1e30), seed=0).test_error)


def test_the_trace_holds_every_trainable_tensor() -> None:
    traces = train(task, Setting("auto-adagrad", 1), seed=0).traces
    assert list(traces) == [name for name, _ in task.model().named_parameters()]
    assert all(len(t.step) == len(t.lr) == len(t.momentum) == len(t.noise) == 5 for t in traces.values())


@pytest.mark.parametrize(("optimizer", "lr"), [("SGD", 0.1), ("sgd", None), ("auto-sgd", 0.1)])
def test_a_setting_that_makes_no_sense_is_refused(optimizer: str, lr: float | None) -> None:
    with pytest.raises(ValueError, match=optimizer):
        Setting(optimizer, 1, lr)


def test_the_digits_task_is_what_its_description_says() -> None:
    data = task.data()
    assert (len(data.train_targets), len(data.test_targets)) == (1280, 517)
    assert "1,280" in task.description
    assert "517" in task.description
    assert f"{sum(weight.numel() for weight in task.model().parameters()):,} weights" in task.description


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", cli.__name__, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--epochs", "0"], "--epochs"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--out", "{tmp}/file/demo"], "choose a folder"),
        (["dem"], "dem"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(sys, "argv", ["autoopt", *(argument.format(tmp=tmp_path) for argument in arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("autoopt: ")
    assert says in err
    assert "Traceback" not in err


def test_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["autoopt", "demo", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert "autoopt demo --epochs" in capsys.readouterr().out


def test_the_laboratory_imports_with_torch_and_numpy_alone() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['sklearn', 'plotly', 'rich', 'typer', 'jinja2'])); "
    modules = "import autoopt_lab, autoopt_lab.tasks.digits, autoopt_lab.train"
    subprocess.run([sys.executable, "-c", blocked + modules], check=True)


def test_the_demo_from_end_to_end(tmp_path: Path) -> None:
    result = command("demo", "--epochs", "1", "--out", str(tmp_path / "new" / "folder"))
    assert (result.returncode, result.stderr) == (0, "")
    path = tmp_path / "new" / "folder" / "index.html"
    assert result.stdout.splitlines()[-1] == f"Page: {path}"
    assert [file.name for file in path.parent.iterdir()] == ["index.html"]
    assert "s left" in result.stdout  # plain lines: this is no terminal
    assert all(label(name) in result.stdout for name in DEFAULT)
    shown = Page(path.read_text(encoding="utf-8"))
    assert len(shown.rows["runs"]) == 1 + 90
    assert len(shown.figures) == 9
