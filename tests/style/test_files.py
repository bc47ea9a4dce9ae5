"""File length, names, `__all__` and docstring heads."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

import kvtailor
from kvtailor import find

ROOT = Path(kvtailor.__file__).parent
REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(path for path in ROOT.rglob("*.py"))
OURS = [*SOURCES, *(path for name in ("docs", "tests") for path in sorted((REPOSITORY / name).rglob("*.py")))]
LONGEST = 300
FORBIDDEN = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|stuff)(_|$)", re.IGNORECASE)
HEADS = ("Idea", "Paper", "Source", "Departs", "Cost")
METHODS = [info for room in find.rooms() for info in find.methods(room).values()]
LETTERS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")


def of_file(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def too_long(path: Path) -> bool:
    return path.read_text(encoding="utf-8").count("\n") >= LONGEST


def forbidden_names(path: Path) -> list[str]:
    """Names of the file, its classes and functions that say nothing about what is inside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in [path.stem, *named] if FORBIDDEN.search("_".join(LETTERS.findall(name)))]


def public_names(tree: ast.Module) -> set[str]:
    """What a module defines at its top level without an underscore."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }


@pytest.mark.parametrize("path", OURS, ids=of_file)
def test_is_short(path: Path) -> None:
    assert not too_long(path), f"{of_file(path)} has {LONGEST} lines or more: is it still one room?"


@pytest.mark.parametrize("path", OURS, ids=of_file)
def test_names_say_something(path: Path) -> None:
    assert forbidden_names(path) == []


@pytest.mark.parametrize("path", SOURCES, ids=of_file)
def test_has_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{of_file(path)} does not say what it is"


@pytest.mark.parametrize("path", SOURCES, ids=of_file)
def test_all_is_there_and_true(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    if not said:
        assert path.stem == "__init__" or not public_names(tree), f"{of_file(path)} has public names and no __all__"
        return
    names = ast.literal_eval(said[0])
    assert len(set(names)) == len(names)
    dotted = ".".join(["kvtailor", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    try:
        module = importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("triton is not installed")
    assert [name for name in names if not hasattr(module, name)] == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """Outside of packages pytest imports a file by its bare name, and stops at the second of one name."""
    tests = ROOT.parents[1] / "tests"
    bare = [path for path in tests.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    twice = {name for name, count in Counter(path.name for path in bare).items() if count > 1}
    assert bare and not twice


def test_the_checks_see_what_they_forbid(tmp_path: Path) -> None:
    for text, name in (("def my_helper(): ...", "my_helper"), ("class CacheManager: ...", "CacheManager")):
        path = tmp_path / "bad.py"
        path.write_text(text)
        assert forbidden_names(path) == [name]
    path.write_text("\n" * LONGEST)
    assert too_long(path)
    (tmp_path / "utils.py").write_text("")
    assert forbidden_names(tmp_path / "utils.py") == ["utils"]


def test_method_names_are_unique_across_rooms() -> None:
    assert [name for name, count in Counter(info.name for info in METHODS).items() if count > 1] == []


@pytest.mark.parametrize("room", find.rooms())
def test_every_public_method_file_of_a_room_is_found(room: str) -> None:
    """A file that holds a subclass of the contract but is not listed would be a method that no plan can name."""
    contract = find.contract(room)
    for path in (ROOT / room).glob("*.py"):
        module = importlib.import_module(f"kvtailor.{room}.{path.stem}")
        own = [
            each
            for each in vars(module).values()
            if isinstance(each, type)
            and issubclass(each, contract)
            and each is not contract
            and each.__module__ == module.__name__
            and not each.__name__.startswith("_")
        ]
        listed = [info.class_name for info in find.methods(room).values() if info.module == module.__name__]
        assert [each.__name__ for each in own] == listed


@pytest.mark.parametrize("info", METHODS, ids=lambda info: info.name)
def test_a_method_has_its_docstring_heads(info: find.MethodInfo) -> None:
    path = ROOT / info.room / f"{info.name}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    places = [text.find(f"*{head}*") for head in HEADS]
    assert -1 not in places and places == sorted(places), f"{of_file(path)}: heads {HEADS}, in this order"
    assert info.summary.endswith(".") and info.paper


@pytest.mark.parametrize("info", METHODS, ids=lambda info: info.name)
def test_a_method_is_a_frozen_keyword_only_dataclass_that_text_can_write(info: find.MethodInfo) -> None:
    kind = find.load(info.room, info.name)
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    fields = dataclasses.fields(kind)
    assert all(field.kw_only for field in fields)
    # `method` is the key that names the method in TOML.
    assert "method" not in {field.name for field in fields}


def test_every_paper_of_a_method_is_in_the_bibliography() -> None:
    known = set(
        re.findall(r"eprint = \{(\d{4}\.\d{5})\}", (REPOSITORY / "docs" / "papers.bib").read_text(encoding="utf-8"))
    )
    cited = {number for info in METHODS for number in re.findall(r"\d{4}\.\d{5}", info.paper)}
    assert cited - known == set()


def test_every_preset_cites_a_key_of_the_bibliography() -> None:
    known = set(re.findall(r"@\w+\{(\w+),", (REPOSITORY / "docs" / "papers.bib").read_text(encoding="utf-8")))
    cited = {preset.paper.split(",")[0].split()[0] for preset in find.presets().values() if preset.paper}
    assert cited and cited - known == set()
