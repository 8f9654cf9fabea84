"""The documentation site: `make docs`. Nothing is fetched, neither when it is built nor when it is read."""

from importlib.util import find_spec

import autoopt

project = "AutoOpt"
author = "The AutoOpt authors"
copyright = "The AutoOpt authors, Apache-2.0"  # noqa: A001 - Sphinx's own name
version = release = autoopt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False  # torch's names lead to torch's site, which is not here

html_theme = "furo"
html_title = f"AutoOpt {version}"
html_copy_source = False

myst_heading_anchors = 3

autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_mock_imports = [name for name in ("lightning", "transformers") if find_spec(name) is None]  # extras
default_role = "code"  # docstrings write `name` as Markdown does


def as_markdown(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are written as Markdown: |w| is a norm and no substitution, an indented block is code or a formula."""
    if what in ("attribute", "property") and lines and lines[-1].startswith(":type: "):
        kind = lines.pop().removeprefix(":type: ")  # napoleon took the words before a colon for a type
        lines[0] = f"{kind}: {lines[0]}"
    inside = False
    result: list[str] = []
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and result and not result[-1]:
            result += ["::", ""]
            inside = True
        elif line and not indented:
            inside = False
        result.append(line if inside else line.replace("|", r"\|"))
    lines[:] = result


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", as_markdown)  # type: ignore[attr-defined]
