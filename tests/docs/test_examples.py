"""Every example in the documentation runs as it is printed, and the site is built without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import blocks, run
from torch import nn

from ranks import torchrun

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SEVERAL_RANKS = DOCS / "guides" / "several-gpus.md"  # a script for torchrun
EXTRAS = ("accelerate", "lightning", "tensorboard", "transformers")
PAGES = sorted(page for page in DOCS.rglob("*.md") if blocks(page) and page != SEVERAL_RANKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # pages may save a checkpoint
    try:
        run(page)
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        pytest.skip(f"{missing.name}, which this page is about, is not installed")


def test_several_ranks(tmp_path: Path) -> None:
    (script,) = blocks(SEVERAL_RANKS)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    assert "2 ranks, the same weights on all" in torchrun("train.py", folder=tmp_path)


def test_readme() -> None:
    """Its blocks speak of a model, batches and a loss of the reader's."""
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 2, 3))
    model.add_module("rest", nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(2 * 36, 4)))
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 4, (8,))) for _ in range(3)]
    run(
        ROOT / "README.md",
        {"model": model, "batches": batches, "loss_fn": nn.functional.cross_entropy, "evaluate": nn.Module.eval},
    )


def test_only_other_peoples_code_is_not_run() -> None:
    """A ```py block is not run: it shows how another package is used, and the line before it says so."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^(.*)\n\n```py$", text, re.MULTILINE):
            assert "not run here" in found[1], f"{page.name}: {found[1]}"


def test_site(tmp_path: Path) -> None:
    """No warning, and nothing in it that a browser would fetch from elsewhere."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "doctrees", DOCS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fetched = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=.(?:https?:)?//[^>]*>")
    for page in tmp_path.rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), page.name
