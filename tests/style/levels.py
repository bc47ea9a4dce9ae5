"""The import law of ARCHITECTURE §5, as a function over source files."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOMS = ("score", "allocate", "select", "merge", "encode", "store", "attend")
LEVELS = {
    "errors": 0,
    "held": 0,
    "reading": 0,
    "types": 0,
    "method": 0,
    "ops": 1,
    "ledger": 1,
    "calibration": 1,
    "returned": 1,
    "observe": 2,
    **dict.fromkeys(ROOMS, 2),
    "find": 3,
    "plan": 3,
    "plan_arguments": 3,
    "plan_check": 3,
    "plan_read": 3,
    "plan_text": 3,
    "budget": 3,
    "hold": 3,
    "flush": 3,
    "keep": 3,
    "layer": 3,
    "repeat": 3,
    "rollback": 3,
    "route": 3,
    "together": 3,
    "walk": 3,
    "pending": 3,
    "speculate": 3,
    "presets": 3,
    "demo": 3,
    "hf": 4,
    "bench": 5,
    "calibrators": 5,
    "cli": 6,
    "__main__": 6,
}
# `layer` is the other half of `route`: docs/decisions/0003-lanes.md. `walk` and `keep` do what follows a score.
MAY_NAME_ROOMS = ("find", "route", "walk", "layer", "keep")
# The recipe that trains the demo model needs the tokenizers package, and is run by hand.
RECIPE = "demo"


def imports_of(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Every dotted module that a file imports, at any depth, relative ones resolved against `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield base, node.lineno
            if base in ("kvtailor", *(f"kvtailor.{room}" for room in ROOMS)):
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def breaches(root: Path) -> list[str]:
    """What breaks the law in the package at `root`, a sentence for each import."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts == ("__init__",):
            continue
        home, name = parts[0], "/".join(parts)
        package = ".".join(["kvtailor", *parts[:-1]])
        if home not in LEVELS:
            found.append(f"{name} belongs to no level: give it one in {Path(__file__).name}, and in ARCHITECTURE")
            continue
        for module, line in imports_of(ast.parse(path.read_text(encoding="utf-8")), package):
            reason = _breach(home, parts, module.split("."))
            if reason is not None:
                found.append(f"{name}:{line} imports {module}: {reason}")
    return found


def _breach(home: str, parts: tuple[str, ...], module: list[str]) -> str | None:
    if module[0] in ("transformers", "tokenizers"):
        return None if home in ("hf", RECIPE) else "only hf imports transformers"
    if module[0] != "kvtailor" or len(module) == 1:
        return None
    there = module[1]
    if there not in LEVELS:
        return None
    if LEVELS[there] > LEVELS[home] and not (home == RECIPE and there in ("hf", "bench")):
        return f"{home} is level {LEVELS[home]}, {there} is level {LEVELS[there]}"
    if home in ROOMS and there in ROOMS and there != home:
        return "rooms never import each other"
    if there in ROOMS and home not in ROOMS and LEVELS[home] < LEVELS["hf"] and home not in MAY_NAME_ROOMS:
        return "below hf only find and route name rooms"
    if home == "bench" and parts[1:2] == ("report",) and there in ("hf", "route", "layer"):
        return "bench/report reads records only"
    return None


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """A made-up package, to see the law refuse it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
