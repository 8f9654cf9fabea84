"""The figures are what their script draws."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("draw", FIGURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(svg: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", svg)]


def test_figures_are_up_to_date() -> None:
    draw = script()
    for name, svg in (draw.simulated() | draw.measured()).items():
        kept = (FIGURES / name).read_text(encoding="utf-8")
        assert numbers(svg) == pytest.approx(numbers(kept), abs=1), f"{name}: run docs/figures/draw.py"


def test_the_paper_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FIGURES)
    import paper

    results = paper.read(paper.RUNS)
    charts, hidden = paper.figures(results)
    page = paper.PAGE.read_text(encoding="utf-8")
    assert paper.filled(page, paper.parts(results, hidden)) == page, "run docs/figures/paper.py"
    for name, svg in charts.items():
        kept = (FIGURES / name).read_text(encoding="utf-8")
        assert numbers(svg) == pytest.approx(numbers(kept), abs=1), f"{name}: run docs/figures/paper.py"
