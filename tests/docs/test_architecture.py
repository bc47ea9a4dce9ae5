"""docs/architecture.md is one page that names every folder of code, files that exist, the levels of the import law."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.style.levels import LEVELS

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "kvtailor"
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the page has no section {title!r}"
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each line of the tables in a text, heads and rules left out."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rule = set("".join(cells)) <= {"-"}
        if line.startswith("|") and not rule and cells[0] not in ("law", "level", "change", "word"):
            yield cells


def folders(package: Path) -> set[str]:
    """Every folder of a package that has a Python file, as the page names it."""
    found = {path.parent.relative_to(package).as_posix() for path in package.rglob("*.py")}
    return {f"{name}/" for name in found - {"."}}


def named_in_tree(page: str) -> set[str]:
    """The paths of the section "The tree"."""
    return {name for cells in rows(section(page, "The tree")) for name in re.findall(r"`([^`]+)`", cells[1])}


def named_paths(page: str) -> set[str]:
    """Everything in backticks that is written as a path: it ends with a suffix that we use, or with a slash."""
    inline = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    words = (word for code in re.findall(r"`([^`\n]+)`", inline) for word in code.split())
    return {word for word in words if re.fullmatch(r"[\w./-]+(\.(py|md|toml)|/)", word)}


def missing(page: str) -> list[str]:
    """Paths that a page names and that exist neither in the package nor in the repository."""
    return sorted(n for n in named_paths(page) if not (PACKAGE / n).exists() and not (REPOSITORY / n).exists())


def levels(page: str) -> dict[str, int]:
    """The levels of the tree, as `tests/style/levels.py` has them; a row without one goes on with the row above."""
    table = [(cells[0], cells[1]) for cells in rows(section(page, "The tree")) if cells[0]]
    named = {name: int(level) for level, names in table for name in re.findall(r"`([^`]+)`", names)}
    return {name.removesuffix("/").removesuffix(".py"): at for name, at in named.items() if "/" not in name[:-1]}


def test_every_folder_is_named_and_every_name_is_a_folder_or_a_file() -> None:
    named = named_in_tree(PAGE)
    assert {name for name in named if name.endswith("/")} == folders(PACKAGE)
    modules = {path.name for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert {name for name in named if not name.endswith("/")} == modules


def test_every_path_exists() -> None:
    assert len(named_paths(PAGE)) > 80
    assert missing(PAGE) == []


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 110


def test_every_law_names_a_test() -> None:
    laws = list(rows(section(PAGE, "The laws")))
    assert [law.split(".")[0] for law, _ in laws] == [str(number) for number in range(1, len(laws) + 1)]
    assert all(named_paths(test) and all(path.startswith("tests/") for path in named_paths(test)) for _, test in laws)


def test_the_levels_are_those_of_the_test() -> None:
    assert levels(PAGE) == LEVELS


def test_which_file_has_at_least_ten_answers() -> None:
    answers = list(rows(section(PAGE, "Which file do I edit for ...?")))
    assert len(answers) >= 10
    assert all(named_paths(answer) for _, answer in answers)


@pytest.mark.parametrize(
    ("was", "now", "what"),
    [
        ("`score/by_keys/`", "`score/by_values/`", "score/by_values/"),
        ("`engine/evict.py`", "`engine/walk.py`", "engine/walk.py"),
        ("`CONTRIBUTING.md`", "`docs/contributing.md`", "docs/contributing.md"),
    ],
)
def test_a_path_that_is_gone_is_seen(was: str, now: str, what: str) -> None:
    assert was in PAGE
    assert missing(PAGE.replace(was, now)) == [what]


def test_a_folder_that_is_new_and_a_level_that_differs_are_seen(tmp_path: Path) -> None:
    (tmp_path / "score" / "new").mkdir(parents=True)
    (tmp_path / "score" / "empty").mkdir()
    (tmp_path / "score" / "data.toml").write_text("")
    (tmp_path / "score" / "new" / "file.py").write_text("")
    assert folders(tmp_path) - named_in_tree(PAGE) == {"score/new/"}
    assert levels(PAGE.replace("| 4 | `hf/`", "| 5 | `hf/`")) != LEVELS
