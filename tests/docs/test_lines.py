"""Pages are read as source, too: their lines have 120 characters at most, as the code's do."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {"paper.md", "trust.md", "research.md"}  # by a script, but for the log, which is not changed any more
PAGES = [page for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "guides") for page in folder.glob("*.md")]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in MADE], ids=lambda page: page.name)
def test_no_line_is_too_long(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert [n for n, line in lines if len(line) > 120 and not line.startswith((" " * 4, "|"))] == []  # code, tables
