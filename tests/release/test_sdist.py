"""The sdist holds what git holds, and the tests pass from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")

ROOT = Path(__file__).parents[2]
# A link to src/kvtailor/suites, which an sdist would turn into copies.
LEFT_OUT = {"suites"}


def git(*words: str) -> set[str]:
    """The files that git lists, without those that are deleted here."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout here")
    done = subprocess.run(["git", "ls-files", "-z", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_it_holds_what_git_holds(tmp_path: Path) -> None:
    # Its list alone, which takes no time: nothing is copied.
    words = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (written,) = tmp_path.rglob("SOURCES.txt")
    listed = {name for name in written.read_text(encoding="utf-8").splitlines() if ".egg-info/" not in name}
    assert git() - listed == LEFT_OUT
    assert listed - git("--cached", "--others", "--exclude-standard") == set(), "git ignores these files"


@pytest.mark.long
def test_tests_pass_from_it(tmp_path: Path) -> None:
    """Those that read the repository's own files; the others see the package alone."""
    words = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / made.name.removesuffix(".tar.gz")
    # Kernels are compiled when it is installed; here those of this checkout serve.
    for library in (ROOT / "src" / "kvtailor" / "ops" / "cpu").glob("*.so"):
        shutil.copy(library, folder / library.relative_to(ROOT))
    chosen = ("style", "docs", "release", "demo", "data", "score", "bench/suite")
    tests = [f"tests/{name}" for name in chosen if any((ROOT / "tests" / name).rglob("test_*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder / "src", folder)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
