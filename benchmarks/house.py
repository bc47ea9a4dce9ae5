"""How large the house is, and how finely it is cut: counts of the package's source at one or more commits.

    python -m benchmarks.house                    # the working tree
    python -m benchmarks.house OLD HEAD           # commits, side by side

Counted are Python files below src/kvtailor. Lines are parted by what they are: a line of a docstring, a comment, blank,
or code; lines of C++ and of tests are beside them. An import between folders is a pair of modules, counted once,
whose folders differ. Complexity is McCabe's as ruff counts it. The last line is JSON.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

COMPLEX, PARAMETERS = 12, 8


def tree_of(commit: str, into: Path) -> Path:
    """Write the sources of a commit into a folder, and return it."""
    packed = subprocess.run(["git", "archive", commit, "src", "tests"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(into, filter="data")
    return into


def lines_of(text: str, tree: ast.Module) -> Counter[str]:
    """Count the lines of a file by what they are."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    found: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        kind = "docstring" if number in docstrings else "comment" if bare.startswith("#") else "code"
        found["blank" if not bare and kind == "code" else kind] += 1
    return found


def imports_of(name: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Return the pairs of a module and another one of the package that it imports from another folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtailor"):
            base = (node.module or "").removeprefix("kvtailor").removeprefix(".")
            for alias in node.names:
                there = f"{base}.{alias.name}".strip(".")
                there = there if there in modules else base
                if there and there.rpartition(".")[0] != name.rpartition(".")[0]:
                    yield name, there


def parameters_of(node: ast.FunctionDef) -> int:
    """Count what a call may give, without `self` and `cls`."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in given)


def complex_functions(package: Path) -> int:
    """Count the functions that are more complex than the house's bound."""
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--output-format", "concise"]
        + ["--config", f"lint.mccabe.max-complexity={COMPLEX}", "--exit-zero", str(package)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return found.count(" C901 ")


def counts_of(root: Path) -> dict[str, int]:
    """Return all counts of a tree by what is counted."""
    package = root / "src" / "kvtailor"
    paths = sorted(path for path in package.rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    names = {
        path: ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").strip(".")
        for path in paths
    }
    lines: Counter[str] = Counter()
    for path, text in texts.items():
        lines += lines_of(text, trees[path])
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    tests = [path.read_text(encoding="utf-8").count("\n") for path in (root / "tests").rglob("*.py")]
    native = [path for ending in ("*.cpp", "*.h") for path in package.rglob(ending)]
    return {
        "files": len(paths),
        "folders": len({path.parent for path in paths}),
        "lines": sum(lines.values()),
        **{f"lines of {kind}": lines[kind] for kind in ("code", "docstring", "comment", "blank")},
        "lines of C++": sum(path.read_text(encoding="utf-8").count("\n") for path in native),
        "files of tests": len(tests),
        "lines of tests": sum(tests),
        "imports between folders": len(
            {pair for path in paths for pair in imports_of(names[path], trees[path], set(names.values()))}
        ),
        f"functions above complexity {COMPLEX}": complex_functions(package),
        f"functions with more than {PARAMETERS} parameters": sum(parameters_of(n) > PARAMETERS for n in functions),
        "fmt: skip": sum(text.count("# fmt: skip") for text in texts.values()),
        "names that several classes have": sum(number > 1 for number in classes.values()),
    }


def main() -> None:
    """Print the counts, one column for each commit."""
    commits = sys.argv[1:]
    found: dict[str, dict[str, int]] = {}
    for commit in commits:
        with tempfile.TemporaryDirectory() as folder:
            found[commit] = counts_of(tree_of(commit, Path(folder)))
    if not commits:
        found["here"] = counts_of(Path(__file__).resolve().parents[1])
    print(f"{'':45}" + "".join(f"{name[:14]:>16}" for name in found))
    for what in next(iter(found.values())):
        print(f"{what:45}" + "".join(f"{counts[what]:>16,}" for counts in found.values()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
