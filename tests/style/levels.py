"""The import law of docs/architecture.md, as functions over source files.

Imports count wherever they stand: at the top, inside a function, or under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

STAGES = ("score", "allocate", "select", "merge", "encode", "store", "attend")
LEVELS = {
    "errors": 0,
    "method": 0,
    "types": 0,
    "version": 0,
    "presets": 0,
    "ops": 1,
    "ledger": 1,
    "calibration_file": 1,
    "lmcache_serde": 4,
    "cluster": 1,
    **dict.fromkeys(STAGES, 2),
    "plan": 3,
    "engine": 3,
    "speculate": 3,
    "hf": 4,
    "calibration": 5,
    "bench": 5,
    "fitting": 6,
    "cli": 7,
    "__main__": 7,
}


def imports_of(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Every dotted module or name that a file imports, at any depth, relative ones resolved against `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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
            found.append(
                f"{name} belongs to no level: give it one in {Path(__file__).name} and in docs/architecture.md"
            )
            continue
        for module, line in imports_of(_tree(path), package):
            reason = _breach(home, parts, module.split("."))
            if reason is not None:
                found.append(f"{name}:{line} imports {module}: {reason}")
    return found


def _breach(home: str, parts: tuple[str, ...], module: list[str]) -> str | None:
    if module[0] in ("transformers", "tokenizers"):
        return None if home == "hf" else "only hf imports transformers"
    if module[0] != "kvtailor" or len(module) == 1:
        return None
    there = module[1]
    if there not in LEVELS:
        return None
    if LEVELS[there] > LEVELS[home]:
        return f"{home} is level {LEVELS[home]}, {there} is level {LEVELS[there]}"
    if home in STAGES and there in STAGES and there != home:
        return "stages never import each other"
    if parts[:2] == ("bench", "report") and there in ("hf", "engine"):
        return "bench/report reads records only"
    return None


def graph(root: Path) -> dict[str, set[str]]:
    """Which modules of the package at `root` each of its modules imports, by dotted name without the package's own.

    With a module Python runs the packages that contain it; those that contain the importing module, too, have begun.
    """
    files = {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    names = {name.removesuffix("__init__").rstrip("."): path for name, path in files.items()}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        package = f"kvtailor.{package}".rstrip(".")
        edges[name] = set()
        for module, _ in imports_of(_tree(path), package):
            there = module.removeprefix("kvtailor").removeprefix(".")
            if module.split(".")[0] == "kvtailor" and there in names:
                edges[name] |= {there, *_packages_of(there)} - {name, *_packages_of(name), ""}
    return edges


def _packages_of(module: str) -> set[str]:
    """The packages that Python runs before a module: those that contain it."""
    parts = module.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, each sorted."""
    reached = {name: _reached(name, edges) for name in edges}
    groups = {tuple(sorted(t for t in there if name in reached[t])) for name, there in reached.items() if name in there}
    return [list(group) for group in sorted(groups)]


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = list(edges[start])
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += edges[name]
    return found


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """A made-up package, to see the law refuse it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
