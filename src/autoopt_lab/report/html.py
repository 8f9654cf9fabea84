"""A page from its template: one HTML file that opens from disk without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]


def render(template: str, filters: dict[str, Callable[..., str]], **context: Any) -> str:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("autoopt_lab", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= filters
    return templates.get_template(template).render(plotlyjs=get_plotlyjs(), **context)


def write(html: str, folder: Path) -> Path:
    """Write the page into `folder`, whole or not at all."""
    path, part = folder / "index.html", folder / "index.html.part"
    try:
        part.write_text(html, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
