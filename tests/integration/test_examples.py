"""The examples that users copy: each runs on small data and reaches what it says."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ranks import torchrun

Run = Callable[..., list[float]]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 't[a-z]*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # lightning 2.6 with torch 2.13
    pytest.mark.filterwarnings(
        "ignore:'pin_memory' argument is set as true but no accelerator is found"
    ),  # transformers
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as a user does, and return the figures of the last line that it prints."""

    def runner(name: str, *arguments: str) -> list[float]:
        pytest.importorskip("sklearn", reason="the examples train on its digits")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return figures(capsys.readouterr().out)

    return runner


def figures(output: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"\d+\.?\d*", output.strip().splitlines()[-1])]


def test_image_classifier(run: Run) -> None:
    averaged, last = run("image_classifier.py", "--steps", "200", "--watch")
    assert averaged < 8
    assert last < 8


def test_character_gpt(run: Run) -> None:
    loss, entropy = run("character_gpt.py", "--steps", "200")
    assert entropy < loss < 4 * entropy  # 2.9 before the first step


def test_fine_tuning(run: Run) -> None:
    error, trained = run("fine_tuning.py", "--steps", "150")
    assert error < 8
    assert trained == 256 * 5 + 5


def test_streaming_drift(run: Run) -> None:
    before, after, end = run("streaming_drift.py", "--steps", "600")
    assert before < 15
    assert after > 50
    assert end < 10


def test_ddp_torchrun() -> None:
    pytest.importorskip("sklearn", reason="the examples train on its digits")
    output = torchrun(EXAMPLES / "ddp_torchrun.py")
    error, ranks = figures(output)
    assert error < 8
    assert ranks == 2
    assert "the same rates" in output


def test_lightning(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason="needs the extra autoopt[lightning]")
    (error,) = run("lightning_example.py", "--folder", str(tmp_path))
    assert error < 8
    assert "rate/model.0.weight" in next(tmp_path.rglob("metrics.csv")).read_text()


def test_hf_trainer(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra autoopt[hf]")
    (error,) = run("hf_trainer_example.py", "--folder", str(tmp_path))
    assert error < 8


def test_accelerate(run: Run) -> None:
    pytest.importorskip("accelerate", reason="needs the extra autoopt[hf]")
    (error,) = run("accelerate_example.py")
    assert error < 8
