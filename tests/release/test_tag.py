"""What a release needs: one version everywhere, and no address that is a placeholder."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import kvtailor

ROOT = Path(__file__).parents[2]
CHECK = runpy.run_path(str(ROOT / "release" / "check_tag.py"))
PLACEHOLDER = CHECK["PLACEHOLDER"]


@pytest.fixture(scope="module")
def check() -> dict:
    return CHECK


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """What is checked, as it is when 1.2.3 can be released."""
    for name in ("CHANGELOG.md", *CHECK["ADDRESSED"]):
        text = (ROOT / name).read_text(encoding="utf-8").replace(PLACEHOLDER, "host.example/us")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    write(tmp_path, "CHANGELOG.md", r"\A(.*?)^## .*?$", r"\g<1>## 1.2.3 (2026-12-01)")
    write(tmp_path, "CITATION.cff", r"^version: .*$", "version: 1.2.3")
    (tmp_path / "src" / "kvtailor").mkdir(parents=True)
    (tmp_path / "src" / "kvtailor" / "version.py").write_text('__version__ = "1.2.3"\n')
    return tmp_path


def write(folder: Path, name: str, pattern: str, text: str) -> None:
    path = folder / name
    changed, count = re.subn(pattern, text, path.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE | re.DOTALL)
    assert count == 1
    path.write_text(changed, encoding="utf-8")


def test_this_commit_agrees_with_itself(check: dict) -> None:
    assert list(check["disagreements"](ROOT)) == []
    assert check["version_of"](ROOT) == kvtailor.__version__


def test_what_is_ready_passes(check: dict, ready: Path) -> None:
    assert list(check["faults"](ready, "v1.2.3")) == []


def test_another_tag_is_refused(check: dict, ready: Path) -> None:
    assert list(check["faults"](ready, "v1.2.4")) == [
        "the tag is v1.2.4 and version.py has 1.2.3: the tag of this version is v1.2.3"
    ]


@pytest.mark.parametrize("name", CHECK["ADDRESSED"])
def test_a_placeholder_is_refused(name: str, check: dict, ready: Path) -> None:
    path = ready / name
    path.write_text(f"{path.read_text(encoding='utf-8')}\n# {PLACEHOLDER}\n", encoding="utf-8")
    assert list(check["faults"](ready, "v1.2.3")) == [
        f"{name} has the placeholder {PLACEHOLDER}: write the address of the repository"
    ]


def test_every_file_with_a_placeholder_is_looked_at(check: dict) -> None:
    files = [path for path in ROOT.glob("*") if path.is_file()] + list((ROOT / ".github").rglob("*.*ml"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in files}
    assert {name for name, text in texts.items() if PLACEHOLDER in text} <= set(check["ADDRESSED"])


def test_a_changelog_or_citation_of_another_version_is_refused(check: dict, ready: Path) -> None:
    write(ready, "CHANGELOG.md", r"^## 1\.2\.3", "## 1.2.2")
    write(ready, "CITATION.cff", r"^version: .*?$", "version: 1.2.2")
    assert list(check["disagreements"](ready)) == [
        "version.py has 1.2.3, so CHANGELOG.md begins with '## 1.2.3'; found 1.2.2",
        "version.py has 1.2.3, so CITATION.cff has the version 1.2.3; found 1.2.2",
    ]


def test_a_version_in_development_has_unreleased_notes_and_no_tag(check: dict, ready: Path) -> None:
    (ready / "src" / "kvtailor" / "version.py").write_text('__version__ = "1.2.3.dev0"\n')
    assert list(check["faults"](ready, "v1.2.3.dev0")) == [
        "version.py has 1.2.3.dev0: a version in development is not released",
        "version.py has 1.2.3.dev0, so CHANGELOG.md begins with '## Unreleased'; found 1.2.3",
    ]


@pytest.mark.parametrize("version", ["1.2", "1.2.3-dev", "v1.2.3"])
def test_other_forms_of_a_version_are_refused(version: str, check: dict, ready: Path) -> None:
    (ready / "src" / "kvtailor" / "version.py").write_text(f'__version__ = "{version}"\n')
    assert any("write MAJOR.MINOR.PATCH" in fault for fault in check["disagreements"](ready))
