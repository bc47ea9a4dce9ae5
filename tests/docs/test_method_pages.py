"""The committed pages of docs/methods are what the sources say, and the writer tells when they are not."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtailor.plan import registry

REPOSITORY = Path(__file__).parents[2]
WRITER = REPOSITORY / "docs" / "write_methods.py"
COMMITTED = REPOSITORY / "docs" / "methods"
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#([\w-]+))?\)")


@pytest.fixture(scope="module")
def writer() -> dict:
    return runpy.run_path(str(WRITER))


def test_the_committed_pages_are_what_the_sources_say(writer: dict) -> None:
    assert writer["stale"]() == [], "run `make docs` (or: python docs/write_methods.py) and commit what it writes"


def test_every_method_and_preset_is_there(writer: dict) -> None:
    pages = writer["pages"]()
    index = pages["README.md"]
    for stage in registry.stages():
        for name, info in registry.methods(stage).items():
            page = pages[f"{stage}/{name}.md"]
            assert f"]({stage}/{name}.md)" in index and info.summary in index and info.summary in page
            assert all(f"**{head}**: " in page for head in ("Idea", "Paper", "Source", "Departs", "Cost"))
    for name, preset in registry.presets().items():
        assert f"- **{name}**: `" in index and (not preset.budget or f"`{preset.budget}`" in index)


def test_a_page_has_arguments_evidence_and_the_paper(writer: dict) -> None:
    pages = writer["pages"]()
    snapkv = pages["score/snapkv.md"]
    assert "| `window` | integer | `32` | newest queries that vote, and newest tokens that always stay. |" in snapkv
    assert "| `pooling` | `average` or `max` | `average` |" in snapkv
    assert "](https://arxiv.org/abs/2404.14469), `li2024snapkv`" in snapkv
    assert "needs: `window=32`" in snapkv and "scope: `layer`" in snapkv
    assert "slack: `none` (does not evict while decoding)" in snapkv
    assert "slack: `32` (evicts while decoding)" in pages["score/h2o.md"]
    assert "needs: nothing" in pages["score/position.md"]


def test_links_lead_somewhere(writer: dict) -> None:
    pages = writer["pages"]()
    for name, text in pages.items():
        for path, anchor in LINK.findall(text):
            target = (COMMITTED / name).parent / path
            wanted = os.path.relpath(target.resolve(), COMMITTED)
            assert wanted in pages or target.is_file(), f"{name} links to {path}"
            assert not anchor or f"\n## {anchor}\n" in pages[wanted], f"{name} links to {path}#{anchor}"


def test_it_tells_what_is_stale_and_mends_it(writer: dict, tmp_path: Path) -> None:
    folder = tmp_path / "methods"
    shutil.copytree(COMMITTED, folder)
    writer["write"](folder)
    assert writer["stale"](folder) == []
    page = folder / "score" / "snapkv.md"
    page.write_text(page.read_text(encoding="utf-8").replace("`32`", "`33`"), encoding="utf-8")
    (folder / "allocate" / "pyramid.md").unlink()
    (folder / "select" / "gone.md").write_text("a method that was renamed")
    (folder / "cost.md").write_text("measured")
    told = ["allocate/pyramid.md", "score/snapkv.md", "select/gone.md"]
    assert writer["stale"](folder) == told and writer["write"](folder) == told
    assert writer["stale"](folder) == [] and (folder / "cost.md").read_text() == "measured"


def test_a_second_process_makes_the_same_pages(writer: dict) -> None:
    """The order of a set or a dictionary of one process must not reach a page."""
    code = f"import runpy; print(repr(runpy.run_path({str(WRITER)!r})['pages']()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == repr(writer["pages"]())


def test_the_bibliography_is_read(writer: dict) -> None:
    text = """@misc{a2024one,
  title = {{One} of {Ren{\\'e}}'s --- and {\\c{C}}a},
  author = {G{\\"o}del, Kurt and de la Cruz, Ana},
  year = {2024},
  eprint = {2401.00001},
  archiveprefix = {arXiv}
}

@book{b1999two,
  title = {Two},
  author = {One, A. and Two, B. and Three, C.},
  year = {1999},
  url = {https://example.org/two}
}
"""
    one, two = writer["bibliography"](text)
    assert one.title == "One of René's — and Ça" and one.authors == ("Gödel", "de la Cruz")
    assert one.short == "[Gödel and de la Cruz 2024](https://arxiv.org/abs/2401.00001)"
    assert two.short == "[One et al. 1999](https://example.org/two)" and two.key == "b1999two"
    ours = writer["bibliography"]((REPOSITORY / "docs" / "papers.bib").read_text(encoding="utf-8"))
    assert len(ours) == (REPOSITORY / "docs" / "papers.bib").read_text(encoding="utf-8").count("\n@") + 1
    assert all(paper.title and paper.authors and paper.year for paper in ours)
    assert all(paper.url for paper in ours if int(paper.year) > 2020)


def test_docstring_heads_are_read_with_and_without_colons(writer: dict) -> None:
    text = "First.\n\n*Idea*: one\n\ntwo, *not* a head.\n*Paper* none.\n*Cost* n**2."
    assert writer["heads_of"](text) == {"Idea": "one\n\ntwo, *not* a head.", "Paper": "none.", "Cost": "n**2."}
