"""Names, `__all__` and docstring heads."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

import kvtailor
from kvtailor.plan import registry

ROOT = Path(kvtailor.__file__).parent
REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(path for path in ROOT.rglob("*.py"))
OURS = [*SOURCES, *(path for name in ("docs", "tests") for path in sorted((REPOSITORY / name).rglob("*.py")))]
FORBIDDEN = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|stuff)(_|$)", re.IGNORECASE)
HEADS = ("Idea", "Paper", "Source", "Departs", "Cost")
METHODS = [info for stage in registry.stages() for info in registry.methods(stage).values()]
LETTERS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")


def of_file(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def forbidden_names(path: Path) -> list[str]:
    """Names of the file, its classes and functions that say nothing about what is inside."""
    named = re.findall(r"^\s*(?:async )?(?:class|def) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for name in [path.stem, *named] if FORBIDDEN.search("_".join(LETTERS.findall(name)))]


def public_names(tree: ast.Module) -> set[str]:
    """What a module defines at its top level without an underscore."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }


def test_names_say_something() -> None:
    assert {of_file(path): found for path in OURS if (found := forbidden_names(path))} == {}


def test_every_file_says_what_it_is() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    silent = [of_file(path) for path, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert silent == []


def test_all_is_there_and_true() -> None:
    for path in SOURCES:
        check_all(path)


def check_all(path: Path) -> None:
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
    assert len(set(names)) == len(names), of_file(path)
    dotted = ".".join(["kvtailor", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    try:
        module = importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return
    assert [name for name in names if not hasattr(module, name)] == [], of_file(path)


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
    (tmp_path / "utils.py").write_text("")
    assert forbidden_names(tmp_path / "utils.py") == ["utils"]


def test_frames_of_callers_are_read_in_one_module() -> None:
    reads = re.compile(r"\b(_getframe|currentframe|f_back|f_locals|inspect\.stack)\b")
    assert [of_file(path) for path in SOURCES if reads.search(path.read_text(encoding="utf-8"))] == [
        "src/kvtailor/hf/callers.py"
    ]


def test_method_names_are_unique_across_stages() -> None:
    assert [name for name, count in Counter(info.name for info in METHODS).items() if count > 1] == []


@pytest.mark.parametrize("stage", registry.stages())
def test_every_public_method_file_of_a_stage_is_found(stage: str) -> None:
    """A file that holds a subclass of the contract but is not listed would be a method that no plan can name."""
    contract = registry.contract(stage)
    for path in (ROOT / stage).rglob("*.py"):
        module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
        own = [
            each
            for each in vars(module).values()
            if isinstance(each, type)
            and issubclass(each, contract)
            and each is not contract
            and each.__module__ == module.__name__
            and not each.__name__.startswith("_")
        ]
        listed = [info.class_name for info in registry.methods(stage).values() if info.module == module.__name__]
        assert [each.__name__ for each in own] == listed


def test_a_method_has_its_docstring_heads() -> None:
    for info in METHODS:
        path = ROOT.parent / (info.module.replace(".", "/") + ".py")
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        places = [text.find(f"*{head}*") for head in HEADS]
        assert -1 not in places and places == sorted(places), f"{of_file(path)}: heads {HEADS}, in this order"
        assert info.summary.endswith(".") and info.paper, of_file(path)


def test_a_method_is_a_frozen_keyword_only_dataclass_that_text_can_write() -> None:
    for info in METHODS:
        kind = registry.load(info.stage, info.name)
        params = kind.__dataclass_params__  # type: ignore[attr-defined]
        assert dataclasses.is_dataclass(kind) and params.frozen, info.name
        fields = dataclasses.fields(kind)
        assert all(field.kw_only for field in fields), info.name
        # `method` is the key that names the method in TOML.
        assert "method" not in {field.name for field in fields}, info.name


def test_every_paper_of_a_method_is_in_the_bibliography() -> None:
    known = set(
        re.findall(r"eprint = \{(\d{4}\.\d{5})\}", (REPOSITORY / "docs" / "papers.bib").read_text(encoding="utf-8"))
    )
    cited = {number for info in METHODS for number in re.findall(r"\d{4}\.\d{5}", info.paper)}
    assert cited - known == set()


def test_every_preset_cites_a_key_of_the_bibliography() -> None:
    known = set(re.findall(r"@\w+\{(\w+),", (REPOSITORY / "docs" / "papers.bib").read_text(encoding="utf-8")))
    cited = {preset.paper.split(",")[0].split()[0] for preset in registry.presets().values() if preset.paper}
    assert cited and cited - known == set()


def test_tensors_of_floats_name_their_dtype() -> None:
    """torch's default dtype is the user's own, and kernels take float32 by address: no tensor of ours may follow it."""
    made = {"empty", "zeros", "ones", "eye", "rand", "randn", "linspace"}
    silent = [
        f"{of_file(path)}:{node.lineno}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] not in {"bench", "cli"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in made}
        and not {"dtype", "out"} & {word.arg for word in node.keywords}
    ]
    assert silent == []
