"""The toy task of docs/bench.md, and what makes it one of the bench's tasks."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from kvtailor.bench import tasks
from kvtailor.bench.kinds import KINDS, found_kinds

_DOCUMENT = Path(__file__).parents[3] / "docs" / "bench.md"
_EXAMPLE = re.compile(r"<!-- task: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
[(PLACE, TOY)] = _EXAMPLE.findall(_DOCUMENT.read_text(encoding="utf-8"))
"""The worked example of docs/bench.md: where its file would lie, and its text."""


def write_task(folder: Path, text: str = TOY, name: str = "toy") -> Path:
    """The file of a task in a folder of its own."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def install(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """As if the file lay beside the others."""
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(path.parent)])
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, f"{tasks.__name__}.{path.stem}", raising=False)
    monkeypatch.setitem(KINDS, path.stem, found_kinds()[path.stem])
