"""The hand-written documents: paths, links and commands lead to what exists, and lines are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.test_architecture import PACKAGE, REPOSITORY, named_paths

# Records of their day: files have moved since.
HISTORY = ("CHANGELOG.md", "LOG.md", "docs/log", "docs/decisions/0014-layout.md")
WRITTEN = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md", "docs/log/*.md")
    for path in REPOSITORY.glob(pattern)
    if path.is_file()
)
NOW = [path for path in WRITTEN if not path.relative_to(REPOSITORY).as_posix().startswith(HISTORY)]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
EXAMPLE = re.compile(r"<!-- file: (\S+) -->")
PLACEHOLDERS = ("NAME", "KIND")


def unknown(text: str, folder: Path) -> list[str]:
    """Paths in backticks that exist neither in the package, nor in the repository, nor beside the document.

    Left out are the files that a document shows as an example, and names with a placeholder.
    """
    roots = (PACKAGE, REPOSITORY, folder)
    known = {path.name for path in folder.glob("*")}
    candidates = {name for name in named_paths(text) if "/" in name and not name.startswith("/")} - known
    candidates -= set(EXAMPLE.findall(text))
    candidates = {name for name in candidates if not any(each in name for each in PLACEHOLDERS)}
    return sorted(name for name in candidates if not any((root / name).exists() for root in roots))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(text: str, at: Path) -> list[str]:
    """Links of a document that lead nowhere."""
    found = []
    for path, anchor in LINK.findall(text):
        target = (at.parent / path).resolve() if path else at
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


def commands(text: str) -> set[str]:
    """The modules that a document runs, `python -m kvtailor.a.b` or `kvtailor verb`, as files of the package."""
    modules = {f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m kvtailor\.([\w.]+)", text)}
    verbs = re.findall(r"(?:^ +|`|\bbin/)kvtailor (?:--\w+ \w+ )?([a-z]+)\b", text, re.MULTILINE)
    return {name for name in modules if Path(name).stem not in PLACEHOLDERS} | {f"cli/{verb}.py" for verb in verbs}


def too_long(text: str) -> list[str]:
    """Lines of prose above 120 characters; tables, indented and fenced code and code within a line are left out."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = (line for line in prose.splitlines() if not line.startswith(("|", "    ", "<!--")))
    return [line for line in lines if len(re.sub(r"`[^`]*`", "", line)) > 120 or (len(line) > 120 and "`" not in line)]


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(REPOSITORY).as_posix() for path in paths]


@pytest.mark.parametrize("path", NOW, ids=names(NOW))
def test_every_path_that_a_document_names_exists(path: Path) -> None:
    assert unknown(path.read_text(encoding="utf-8"), path.parent) == []


@pytest.mark.parametrize("path", NOW, ids=names(NOW))
def test_every_command_that_a_document_gives_exists(path: Path) -> None:
    files = commands(path.read_text(encoding="utf-8"))
    assert [name for name in sorted(files) if not (PACKAGE / name).is_file()] == []


@pytest.mark.parametrize("path", WRITTEN, ids=names(WRITTEN))
def test_lines_are_short(path: Path) -> None:
    assert path.name == "CHANGELOG.md" or too_long(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", WRITTEN, ids=names(WRITTEN))
def test_links_lead_somewhere(path: Path) -> None:
    assert broken(path.read_text(encoding="utf-8"), path) == []


def test_the_log_has_an_index_of_its_months() -> None:
    log = (REPOSITORY / "LOG.md").read_text(encoding="utf-8")
    months = sorted((REPOSITORY / "docs" / "log").glob("*.md"), reverse=True)
    assert re.findall(r"\]\((docs/log/[^)]+)\)", log) == names(months)
    for month in months:
        text = month.read_text(encoding="utf-8")
        assert text.startswith(f"# Log of {month.stem}\n")
        assert all(day.startswith(month.stem) for day in re.findall(r"^## (\S+?):", text, re.MULTILINE))


def test_what_leads_nowhere_is_seen() -> None:
    page = REPOSITORY / "docs" / "route.md"
    there = "`engine/evict.py`, `docs/route.md`, `tests/seam/`, `bench/tasks/NAME.py`, `score/x.py`"
    there += "\n<!-- file: score/x.py -->"
    assert unknown(f"{there} `engine/walk.py`", page.parent) == ["engine/walk.py"]
    run = "Run `kvtailor fly`:\n\n    kvtailor ls score\n    python -m kvtailor.bench.foundation --threads 2\n"
    assert commands(run) == {"cli/fly.py", "cli/ls.py", "bench/foundation.py"}
    long = "word " * 25
    assert too_long(f"{long}\n| {long} |\n    {long}\n`{long}`\n") == [long]
    text = "# One two\n[a](#one-two) [b](#three) [c](nowhere.md) [d](route.md) [e](https://example.org/x#y)"
    assert anchors(text) == {"one-two"}
    assert broken("[c](nowhere.md) [d](route.md) [f](route.md#no-such-heading)", page) == [
        "nowhere.md",
        "route.md#no-such-heading",
    ]
