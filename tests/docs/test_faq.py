"""The errors that the documentation quotes are errors that the library has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GAP = "…"  # a name or a number
QUOTED = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)


def written(node: ast.expr) -> str:
    """A string expression with its placeholders replaced by GAP."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) for part in node.values)
    return GAP


def texts() -> set[str]:
    """All texts in the library's source; its errors are among them."""
    nodes = (
        node
        for file in (ROOT / "src" / "autoopt").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )
    return {written(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)}


TEXTS = texts()


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_library_says_so(quoted: str) -> None:
    assert any(quoted in text for text in TEXTS)


def test_there_are_errors_to_look_up() -> None:
    assert len(QUOTED) >= 10
