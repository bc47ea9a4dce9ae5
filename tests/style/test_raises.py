"""Every error that is raised on purpose derives from `KvtailorError`, but for a few kinds with a reason each."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import kvtailor
from kvtailor.errors import KvtailorError

ROOT = Path(kvtailor.__file__).parent
# Folders whose functions are called by other code of ours alone, or by authors of methods: what they refuse is told by
# the plan as `PlanError`, by the cache as `MethodError` or `CacheMisuse`, by the reader of a file as its own error.
_INSIDE = {
    **dict.fromkeys(("allocate", "attend", "encode", "merge", "score", "select", "store"), "a method's contract"),
    "engine": "what a cache holds, and `load_cache` wraps",
    "ops": "what kernels and parts of files take",
    "types": "what methods are given and give",
    "calibration_file.py": "told by `hf.model.calibrated` as CalibrationError",
}
# By kind, where it may be raised: places by how they begin, each with its reason.
ALLOWED: dict[str, dict[str, str]] = {
    "ValueError": {
        **_INSIDE,
        "hf/load_saved.py": "`load_cache` tells it with the name of the file",
        "hf/saved_ranks.py": "`load_cache` tells it with the name of the file",
        "hf/layers/states.py": "`load_cache` tells it with the name of the file",
        "hf/images.py": "`load_cache` tells it with the name of the file",
    },
    "TypeError": {**_INSIDE, "plan/arguments.py": "a value that is not of an annotation, caught by who asked"},
    "RuntimeError": dict.fromkeys(
        ("ops/attention/cpu", "ops/cpu/library.py"),
        "kernels that were refused by torch's pool, which is a fault of ours",
    ),
    "NotImplementedError": {"score/contract.py": "a contract", "hf/layers/of_cache.py": "a contract"},
    "AttributeError": {
        "__init__.py": "the protocol of a module's __getattr__",
        "plan": "the protocol of __getattr__",
        "hf/mask.py": "the protocol of __getattr__",
    },
    "KeyError": {"bench/lm_eval/layouts.py": "a row without a column, told with the row's number"},
    "ReferenceError": {"hf/graphs/forward.py": "what a dead weak reference raises"},
    "SystemExit": {"cli": "the end of a command"},
    "_Unreadable": {"plan/grammar.py": "a place in a plan, which the same file makes a fault of the plan"},
    "_KeysSeen": {"hf/model/key_bias.py": "ends a forward, and never leaves the file"},
}


# Where a class, or what makes an error, is a variable.
BY_A_VARIABLE = {
    "hf/model/tensor_parallel.py": "the kind of error that the first process had, which is one of ours",
    "types/late_checks.py": "made by who asked for the check, which this list cannot tell",
}


def raises(root: Path) -> Iterator[tuple[str, str, ast.expr]]:
    """Module, place and what each `raise` raises; a bare one hands on what was caught."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).as_posix()
        module = ".".join(["kvtailor", *Path(place).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                yield module, f"{place}:{node.lineno}", node.exc


@functools.cache
def imported(module: Any) -> dict[str, Any]:
    """What functions of a module import for themselves, by name."""
    tree = ast.parse(inspect.getsource(module))
    return {
        each.asname or each.name: getattr(importlib.import_module(node.module), each.name, None)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvtailor.")
        for each in node.names
    }


def class_of(module: Any, raised: ast.expr) -> Any:
    """The class of what is raised, as far as the module says; None: a variable, which holds what was caught."""
    named = raised.func if isinstance(raised, ast.Call) else raised
    text = ast.unparse(named)
    first, *rest = text.split(".")
    found: Any = getattr(module, first, getattr(builtins, first, imported(module).get(first)))
    for part in rest:
        found = getattr(found, part, None)
    if found is None and isinstance(raised, ast.Call):
        # A method that makes the error: of whichever class of the module has it.
        owners = [each for each in vars(module).values() if inspect.isclass(each)]
        made = [getattr(each, text.rsplit(".", 1)[-1], None) for each in owners if each.__module__ == module.__name__]
        found = next((each for each in made if each is not None), None)
    if found is None or inspect.isclass(found):
        return found
    hint = typing.get_type_hints(found).get("return") if callable(found) else None
    return hint if inspect.isclass(hint) else None


def breaches(root: Path) -> list[str]:
    found = []
    for name, place, raised in raises(root):
        kind = class_of(importlib.import_module(name), raised)
        if kind is None:
            if isinstance(raised, ast.Call) and not any(place.startswith(where) for where in BY_A_VARIABLE):
                found.append(f"{place}: {ast.unparse(raised.func)} does not say what it makes")
            continue
        if issubclass(kind, KvtailorError | click.ClickException):
            continue
        if not any(place.startswith(where) for where in ALLOWED.get(kind.__name__, {})):
            found.append(f"{place}: {kind.__name__} is no KvtailorError")
    return found


def test_errors_are_ours() -> None:
    assert breaches(ROOT) == []


def test_an_exception_is_used() -> None:
    """What stands in the list and is raised nowhere hides the next one."""
    where = [(class_of(importlib.import_module(name), raised), place) for name, place, raised in raises(ROOT)]
    for kind, places in ALLOWED.items():
        for begins in places:
            used = any(each is not None and each.__name__ == kind and at.startswith(begins) for each, at in where)
            assert used or begins in _INSIDE, f"{kind} in {begins} is raised nowhere: take it out"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raise ValueError('x')", ValueError),
        ("raise CacheMisuse", "CacheMisuse"),
        ("raise told('x')", RuntimeError),
        ("raise Of().told()", None),
    ],
)
def test_the_scan_sees(text: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seen_by_scan.py").write_text(
        "from kvtailor.errors import CacheMisuse\n"
        "def told(text: str) -> RuntimeError:\n    return RuntimeError(text)\n"
        f"def f() -> None:\n    {text}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ((_, place, raised),) = raises(tmp_path)
    assert place == "seen_by_scan.py:5"
    module = importlib.reload(importlib.import_module("seen_by_scan"))
    found = class_of(module, raised)
    assert found is kind or getattr(found, "__name__", None) == kind
