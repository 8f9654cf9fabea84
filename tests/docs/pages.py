"""Runs the examples of a page: its ```python blocks, in order, in one namespace. Nothing is hidden from the reader.

python tests/docs/pages.py docs/start.md      # needs nothing but what the page itself imports
"""

import re
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The code of the page's examples, each at its own line number, so that a traceback points into the page."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


def run(page: Path, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute the page; what it defined comes back."""
    names = {"__name__": "__main__"} if namespace is None else namespace
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), names)
    return names


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
