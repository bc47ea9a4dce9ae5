"""The documentation site, judged without building it: tables of contents, reference, notebooks, commands."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import click
import pytest
from tests.docs.test_paths import broken, names, too_long, unknown

import kvtailor
from kvtailor.cli import main
from kvtailor.plan import registry

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
FOLDERS = ("how-to", "explanation", "peers")
# Pages that `tests/docs/test_paths.py` does not reach.
PAGES = sorted(path for folder in FOLDERS for path in (DOCS / folder).glob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
WITH_COMMANDS = [DOCS / "tutorial.md", DOCS / "reports.md", *PAGES]
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A class that only an attribute gives (`kvtailor.hf.graphs.counts.ReplayCounts`) is none of the public names.
ENTRY = re.compile(r"^\.\. (?:autofunction|autoclass|autoexception|py:data):: kvtailor\.(\w+)(?:\(\))?$", re.MULTILINE)
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def named_in_toctrees(page: Path) -> set[Path]:
    """The files that the tables of contents of a page name, patterns filled in."""
    found: set[Path] = set()
    for block in TOCTREE.findall(page.read_text(encoding="utf-8")):
        for line in (line.strip() for line in block.splitlines()):
            if not line or line.startswith(":"):
                continue
            if "*" in line:
                found |= set(page.parent.glob(f"{line}.md"))
                continue
            there = [path for suffix in (".md", ".ipynb") if (path := page.parent / f"{line}{suffix}").is_file()]
            assert there, f"{page.name} names {line}, which is not there"
            found.add(there[0])
    return found


def reached(start: Path) -> set[Path]:
    """All pages that a reader gets to from one page by tables of contents."""
    found, todo = {start}, [start]
    while todo:
        page = todo.pop()
        more = named_in_toctrees(page) - found if page.suffix == ".md" else set()
        found |= more
        todo += more
    return found


def wrong_options(text: str) -> list[str]:
    """Commands in a document's shell blocks whose verb or options `kvtailor` does not have."""
    found = []
    for block in SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["torchrun"] and "kvtailor" in words:
                words = words[words.index("kvtailor") :]
            if words[:1] != ["kvtailor"]:
                continue
            command = main.get_command(click.Context(main), words[1])
            known = (
                {name for each in command.params for name in (*each.opts, *each.secondary_opts)} if command else set()
            )
            asked = [word.partition("=")[0] for word in words if word.startswith("--")]
            found += [f"{words[1]} {name}" for name in asked if name not in known]
            found += [] if command else [words[1]]
    return found


def test_every_page_is_in_a_table_of_contents() -> None:
    pages = {path for suffix in ("md", "ipynb") for path in DOCS.rglob(f"*.{suffix}")}
    # Plan cards are pages of the hub, with a head in YAML.
    pages = {path for path in pages if path.parent.parent != DOCS / "cards"}
    assert pages - reached(DOCS / "index.md") == set()


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert sorted(ENTRY.findall(text)) == sorted(kvtailor.__all__)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_a_notebook_is_valid_and_has_no_outputs(path: Path) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse(text)
        else:
            assert broken(text, path) == []
        assert [line for line in text.splitlines() if len(line) > 120] == []
    nbformat = pytest.importorskip("nbformat", reason="the extra 'docs' is not installed: read as JSON alone")
    nbformat.validate(nbformat.from_dict(book))


def test_there_are_two_notebooks() -> None:
    assert names(NOTEBOOKS) == ["docs/notebooks/compare-plans.ipynb", "docs/notebooks/first-steps.ipynb"]


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_pages_in_folders_are_like_the_others(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert unknown(text, path.parent) == []
    assert too_long(text) == []
    assert broken(text, path) == []


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=names(WITH_COMMANDS))
def test_commands_have_the_options_that_a_page_gives(path: Path) -> None:
    assert wrong_options(path.read_text(encoding="utf-8")) == []


def test_every_method_has_a_formula_and_every_formula_a_method() -> None:
    writer = runpy.run_path(str(DOCS / "write_methods.py"))
    stages = set(registry.stages())
    methods = {name for stage in stages for name, info in registry.methods(stage).items() if info.by == "kvtailor"}
    found = writer["formulas"]()
    assert set(found) - stages - {"Notation"} == methods
    assert all(found[name] for name in methods)
    assert found["snapkv"] in writer["pages"]()["score/snapkv.md"]


def test_what_the_site_would_refuse_is_seen(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("index.md", "sub/one.md", "sub/two.md", "lost.md"):
        (tmp_path / name).write_text("# Page\n")
    (tmp_path / "index.md").write_text("# Top\n\n```{toctree}\n:glob:\n\nsub/*\n```\n")
    assert {path.name for path in reached(tmp_path / "index.md")} == {"index.md", "one.md", "two.md"}
    (tmp_path / "index.md").write_text("# Top\n\n```{toctree}\ngone\n```\n")
    with pytest.raises(AssertionError, match="names gone"):
        reached(tmp_path / "index.md")
    lines = (
        "kvtailor fit --memory 1GiB \\\n    --speed 3",
        "kvtailor fly",
        "torchrun -m kvtailor bench --plans x --wings",
    )
    text = "\n".join(["```bash", *lines, "```", ""])
    assert wrong_options(text) == ["fit --speed", "fly", "bench --wings"]


def test_formulas_can_be_shown() -> None:
    """The site shows MathML that docutils makes, which knows a part of LaTeX."""
    convert = pytest.importorskip("docutils.utils.math.latex2mathml", reason="the extra 'docs' is not installed")
    text = (DOCS / "methods" / "formulas.md").read_text(encoding="utf-8")
    found = re.findall(r"\$\$\n(.*?)\n\$\$", text, re.DOTALL) + re.findall(r"(?<!\$)\$([^$\n]+)\$(?!\$)", text)
    assert len(found) > 60
    for formula in found:
        assert convert.tex2mathml(formula).startswith("<math")


def test_names_in_code_type_become_links(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="the extra 'docs' is not installed")
    monkeypatch.setattr(sys, "path", [str(DOCS / "extensions"), *sys.path])
    from markdown_docstrings import fences_as_blocks
    from named_pages import page_named

    pages = {"fit", "log/2026-11"}
    asked = ("docs/fit.md", "docs/log/2026-11.md", "LOG.md", "docs/methods/", "docs/gone.md", "fit.md", "docs/fit")
    assert [page_named(text, pages) for text in asked] == ["fit", "log/2026-11", "log", "methods", None, None, None]
    lines = ["Do.", "", "```python", "if x:", "    y()", "```", "Then."]
    made = [".. code-block:: python", "", "    if x:", "        y()", ""]
    assert fences_as_blocks(lines) == ["Do.", "", *made, "Then."]
