"""Docstrings are Markdown with Google's sections; what Sphinx's parser would misread is put into its own form."""

# mypy: disable-error-code="import-not-found,import-untyped,misc"
from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

__all__ = ["fences_as_blocks", "setup"]

_FENCE = re.compile(r"^(\s*)```(\w*)\s*$")
# Napoleon reads the same event at 500, and must find blocks.
_BEFORE_NAPOLEON = 400


def setup(app: Sphinx) -> dict[str, Any]:
    """Change every docstring before its sections are read."""
    app.connect("autodoc-process-docstring", _changed, priority=_BEFORE_NAPOLEON)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def fences_as_blocks(lines: list[str]) -> list[str]:
    """Return the lines of a docstring, its fenced code as directives `code-block`."""
    found: list[str] = []
    indent: str | None = None
    for line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            found.append(line if indent is None or not line.strip() else f"    {line}")
        elif indent is None:
            indent = fence[1]
            found += [f"{indent}.. code-block:: {fence[2] or 'text'}", ""]
        else:
            indent = None
            found.append("")
    return found


def _changed(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    lines[:] = fences_as_blocks(lines)
