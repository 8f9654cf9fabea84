"""The scripts behind the figures can be run: what they take from the project is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS_MORE = {"torch_suite.py": "torch's own tests, and what these need"}
SCRIPTS = sorted(
    path for folder in ("benchmarks", "trust", "tools", "docs/figures") for path in ROOT.glob(f"{folder}/**/*.py")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script.name in NEEDS_MORE:
        pytest.skip(f"needs {NEEDS_MORE[script.name]}")
    for folder in (script.parent, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:  # what scripts take of each other has common names
        for name in sys.modules.keys() - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in {path.parent for path in SCRIPTS}:
                del sys.modules[name]
