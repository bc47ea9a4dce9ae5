"""What there is to choose from: the methods of every stage and the presets, found without importing them.

A method is a file of a stage's folder that holds one public dataclass made from the stage's contract; its name is the
file's name. Other packages add methods with entry points of the group `kvtailor.<stage>`, for example in their
`pyproject.toml`: `[project.entry-points."kvtailor.score"]` and `mine = "their_package.mine:Mine"`.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.method import Method

if TYPE_CHECKING:
    from kvtailor.allocate.contract import Allocator
    from kvtailor.attend.contract import Attention
    from kvtailor.encode.contract import Codec
    from kvtailor.merge.contract import Merger
    from kvtailor.score.contract import Scorer
    from kvtailor.select.contract import Selector
    from kvtailor.store.contract import Placement

__all__ = [
    "Allocator",
    "Attention",
    "Codec",
    "Merger",
    "MethodInfo",
    "Placement",
    "Preset",
    "Scorer",
    "Selector",
    "contract",
    "describe",
    "load",
    "method_of",
    "methods",
    "name_of",
    "null",
    "null_stages",
    "preset_of",
    "presets",
    "stage_of",
    "stages",
]

_CONTRACTS = {
    "score": "Scorer",
    "allocate": "Allocator",
    "select": "Selector",
    "merge": "Merger",
    "encode": "Codec",
    "store": "Placement",
    "attend": "Attention",
}
"""The abstract class of each stage, in the stage's module `contract`; imported when it is first needed."""
_NULL = {
    "allocate": "uniform",
    "select": "topk",
    "merge": "drop",
    "encode": "plain",
    "store": "device",
    "attend": "segments",
}
_HOME = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """One method, as far as its source text or its entry point describes it.

    Attributes:
        name: what a plan calls it.
        stage: one of `stages()`.
        module: dotted name of the module that holds it.
        class_name: its class there.
        summary: first line of the module's docstring; of a third party, its distribution's summary.
        paper: what stands after the docstring's head *Paper*; empty where there is none.
        by: distribution that brings it.
    """

    name: str
    stage: str
    module: str
    class_name: str
    summary: str
    paper: str
    by: str = "kvtailor"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A plan with a name, as its TOML file has it.

    Attributes:
        name: the file's name.
        plan: the plan's TOML table.
        paper: key in `docs/papers.bib` and where in it; empty where there is none.
        note: what it is and how it differs from the paper, one or two sentences.
        budget: a budget to begin with, as a plan writes it; empty where nothing is evicted.
        once: names that it had before, which plans, records and files of then still say.
    """

    name: str
    plan: Mapping[str, object]
    paper: str
    note: str
    budget: str
    once: tuple[str, ...] = ()


if not TYPE_CHECKING:  # a type checker is to miss names that are not there

    def __getattr__(name: str) -> Any:
        """The contracts by their names. They import torch, which a list of what there is does not need."""
        for stage, contract_name in _CONTRACTS.items():
            if contract_name == name:
                return contract(stage)
        raise AttributeError(f"module 'kvtailor.plan.registry' has no attribute {name!r}")


def stages() -> tuple[str, ...]:
    """The stages whose methods a plan names, in the order in which they work."""
    return tuple(_CONTRACTS)


def contract(stage: str) -> type[Method]:
    """The abstract class of a stage.

    Raises:
        UnknownName: no such stage.
    """
    name = _contract_name(stage)
    found: type[Method] = getattr(importlib.import_module(f"kvtailor.{stage}.contract"), name)
    return found


def _contract_name(stage: str) -> str:
    if stage not in _CONTRACTS:
        raise UnknownName("stage", stage, _CONTRACTS)
    return _CONTRACTS[stage]


def methods(stage: str) -> dict[str, MethodInfo]:
    """The methods of one stage by name, in alphabetical order. Nothing is imported.

    Raises:
        UnknownName: no such stage.
        KvtailorError: a file of the stage holds two methods, or two packages bring the same name.
    """
    found: dict[str, MethodInfo] = {}
    for info in [*_own(stage, _contract_name(stage)), *_of_others(stage)]:
        if info.name in found:
            other = found[info.name]
            raise KvtailorError(
                f"two methods are named {info.name!r} in {stage}: {other.class_name} of {other.by} and "
                f"{info.class_name} of {info.by}; rename or uninstall one of them"
            )
        found[info.name] = info
    return dict(sorted(found.items()))


def stage_of(name: str) -> str:
    """The stage of a method.

    Raises:
        UnknownName: no stage has it.
        KvtailorError: two stages have it.
    """
    return describe(name).stage


def describe(name: str) -> MethodInfo:
    """What is known of a method before it is imported; raises as `stage_of`."""
    everywhere = {stage: methods(stage) for stage in stages()}
    hits = [found[name] for found in everywhere.values() if name in found]
    if not hits:
        raise UnknownName(
            "method", name, {**{n: None for found in everywhere.values() for n in found}, **dict.fromkeys(presets())}
        )
    if len(hits) > 1:
        places = " and ".join(f"{info.stage} (by {info.by})" for info in hits)
        raise KvtailorError(f"the name {name!r} is a method of {places}; rename or uninstall one of them")
    return hits[0]


def load(stage: str, name: str) -> type[Method]:
    """The class of a method; imports its module and no other method.

    Raises:
        UnknownName: no such stage, or no such method in it.
        KvtailorError: it cannot be imported, or it does not keep the stage's contract.
    """
    known = methods(stage)
    if name not in known:
        raise UnknownName(f"method of {stage}", name, known)
    info = known[name]
    try:
        loaded = getattr(importlib.import_module(info.module), info.class_name)
    except (ImportError, AttributeError, TypeError) as error:
        raise KvtailorError(f"{stage} method {name!r} of {info.by} cannot be imported: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, contract(stage))):
        raise KvtailorError(
            f"{stage} method {name!r} of {info.by} is {info.module}.{info.class_name}, which is not a "
            f"{contract(stage).__name__}: derive it from kvtailor.{stage}.contract.{contract(stage).__name__}"
        )
    return loaded


def null(stage: str) -> str | None:
    """The method that a plan has in this stage when it names none; None for `score`, where nothing is evicted then."""
    _contract_name(stage)
    return _NULL.get(stage)


def null_stages() -> frozenset[str]:
    """The stages that have a method in every plan."""
    return frozenset(_NULL)


def method_of(stage: str, name: str | None) -> Method | None:
    """A method with its defaults; None for the name None."""
    return None if name is None else load(stage, name)()


def name_of(method: object) -> str:
    """The name under which a plan writes this method; the class name of a class that no stage lists."""
    kind = type(method)
    for stage in _CONTRACTS:
        if isinstance(method, contract(stage)):
            for info in methods(stage).values():
                if (info.module, info.class_name) == (kind.__module__, kind.__qualname__):
                    return info.name
    return kind.__qualname__


@cache
def presets() -> dict[str, Preset]:
    """All presets by name, in alphabetical order."""
    found = {}
    for path in sorted((_HOME / "presets").glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        about = table.pop("about", {})
        found[path.stem] = Preset(
            name=path.stem,
            plan=table,
            paper=about.get("paper", ""),
            note=about.get("note", ""),
            budget=about.get("budget", ""),
            once=tuple(about.get("once", ())),
        )
    return found


def preset_of(name: str) -> Preset | None:
    """The preset that has this name, or had it before; None: none."""
    known = presets()
    return known.get(name) or next((each for each in known.values() if name in each.once), None)


@cache
def _own(stage: str, base: str) -> tuple[MethodInfo, ...]:
    """The methods that are files of the stage's own folder and its sub-folders, from their syntax trees."""
    found = []
    for path in sorted((_HOME / stage).rglob("*.py")):
        if path.stem in ("__init__", "contract"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and _is_method(node, base)]
        if not classes:
            continue
        if len(classes) > 1:
            names = " and ".join(node.name for node in classes)
            raise KvtailorError(f"{path} holds the methods {names}: one method is one file, give each its own")
        text = ast.get_docstring(tree) or ""
        found.append(
            MethodInfo(
                name=path.stem,
                stage=stage,
                module=".".join(["kvtailor", *path.relative_to(_HOME).with_suffix("").parts]),
                class_name=classes[0].name,
                summary=text.split("\n", 1)[0].strip(),
                paper=_head(text, "Paper"),
            )
        )
    return tuple(found)


def _is_method(node: ast.ClassDef, base: str) -> bool:
    """A public dataclass made from the contract."""
    parents = {ast.unparse(parent).rsplit(".", 1)[-1] for parent in node.bases}
    marks = {ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in node.decorator_list}
    return not node.name.startswith("_") and base in parents and bool(marks & {"dataclass", "dataclasses.dataclass"})


def _head(text: str, head: str) -> str:
    """What stands after a docstring head, up to the next head or empty line."""
    hit = re.search(rf"^\*{head}\*[ :.]*(.*?)(?=^\*[A-Z]|^\s*$|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(hit.group(1).split()) if hit else ""


@cache
def _of_others(stage: str) -> tuple[MethodInfo, ...]:
    """The methods that installed distributions register."""
    found = []
    for point in entry_points(group=f"kvtailor.{stage}"):
        module, _, class_name = point.value.partition(":")
        found.append(
            MethodInfo(
                name=point.name,
                stage=stage,
                module=module.strip(),
                class_name=class_name.strip(),
                summary=str(point.dist.metadata.json.get("summary", "")) if point.dist is not None else "",
                paper="",
                by=point.dist.name if point.dist is not None else "another package",
            )
        )
    return tuple(found)
