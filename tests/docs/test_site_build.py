"""The site builds without a warning, its notebooks run, and the snippets of its pages do what they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_paths import names
from tests.support.docs_code import as_installed

import kvtailor
from kvtailor.fitting.effort import Effort
from kvtailor.fitting.material import generated

DOCS = Path(__file__).parents[2] / "docs"
SNIPPET = re.compile(r"(?:<!-- (not run|needs): (.*?) -->\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_SNIPPETS = [
    path
    for path in sorted(
        [
            DOCS / "index.md",
            DOCS / "tutorial.md",
            DOCS / "coming-from-kvpress.md",
            *DOCS.glob("how-to/*.md"),
            *DOCS.glob("explanation/*.md"),
        ]
    )
    if SNIPPET.search(path.read_text(encoding="utf-8"))
]
# A search measures many plans.
NEED_A_FIT = {"tutorial"}
# Far too little for a plan that is to be used.
LEAST = Effort(
    name="least",
    first=(3, 1),
    rest=(1, 1),
    widths=(4,),
    shares=(0.25,),
    by_head=False,
    trials=2,
    front=1,
    levels=(),
    fitted=1,
    presets=1,
    windows=(6, 5),
    reads_twice=False,
)
SLOW = (
    "nuq",
    "minicache",
    "orthogonal",
    "h2o",
    "lowrank",
    "channels",
    "hadamard",
    "pairs",
    "tova",
    "expected",
    "keydiff",
    "critical",
    "dynamickv",
    "kvplugin",
    "bit_table",
    "chunks",
    "kvzip",
)


def put(needed: str, folder: Path) -> None:
    """Make what a snippet needs from a command before it."""
    assert needed == "fitted", f"a page needs {needed}, which no test makes"
    kvtailor.fit(
        "demo",
        generated(256, windows=16),
        keep_bytes=0.3,
        context=256,
        effort=LEAST,
        timed=False,
        tasks=["needle"],
        proof_tasks=["passkey"],
        stages=["layers"],
        without=SLOW,
        out=folder / "fitted",
    )


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.long if path.stem in NEED_A_FIT else ()) for path in WITH_SNIPPETS],
    ids=names(WITH_SNIPPETS),
)
def test_the_snippets_of_a_page_run_one_after_the_other(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {"__name__": path.stem}
    for mark, about, code in SNIPPET.findall(path.read_text(encoding="utf-8")):
        if mark == "not run":
            continue
        if mark == "needs":
            put(about, tmp_path)
        exec(compile(as_installed(code), str(path), "exec"), known)
    assert capsys.readouterr().out.strip() or path.stem == "many-gpus"


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """The notebooks are run, offline."""
    pytest.importorskip("sphinx", reason="the extra 'docs' is not installed: `make docs` installs it")
    paths = [str(DOCS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path / "site"),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    site = tmp_path / "site"
    page = (site / "api.html").read_text(encoding="utf-8")
    assert all(f'id="kvtailor.{name}"' in page for name in kvtailor.__all__)
    book = (site / "notebooks" / "compare-plans.html").read_text(encoding="utf-8")
    assert "kivi(bits=4, recent=32)" in book and "_images/" in book
    assert "<math" in (site / "methods" / "score" / "snapkv.html").read_text(encoding="utf-8")
    route = (site / "route.html").read_text(encoding="utf-8")
    assert re.search(r'href="architecture.html".{0,80}Architecture', route)
