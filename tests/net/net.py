"""Goldens under a restructuring: what the package does, written down at one commit and compared at another.

    python tests/net/net.py compare OLD [NEW]    # two commits on this machine; NEW: the working tree
    python tests/net/net.py check                # the working tree against tests/net/goldens
    python tests/net/net.py golden               # writes tests/net/goldens anew
    python tests/net/net.py write FOLDER         # all that one tree gives

Four things are compared: what caches hold, cost and compute (`cases.py`), the public names and their signatures, the
texts of plans and of the command line's help, and every page made of the records in `docs/records` and in
`tests/net/records` (a made-up run of all tasks).

`compare` is exact to the last bit, since both sides run on one processor with one thread. Sums of floats differ between
processors, so that the committed goldens have no logits, and of held sets only those that come out the same by the
plain forms and by the kernels. The commands end with 1 where something differs, and print the first differences.

Names that are not public are read in `inside.py` alone, and each tree is read by its own.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import hashlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDENS = HERE / "goldens"
_SHOWN = 12


def write(to: Path, tree: Path) -> None:
    """Write all that the package on the path gives: `caches.json.gz` and texts.

    Args:
        to: a folder, which is made.
        tree: the checkout of that package, of which `docs/records` and `tests/net/inside.py` are read.
    """
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    to.mkdir(parents=True, exist_ok=True)
    inside = _inside(tree)
    for name, text in _texts(inside, tree):
        (to / name).write_text(text, encoding="utf-8")
    caches = json.dumps(_caches(inside), indent=0, sort_keys=True)
    (to / "caches.json.gz").write_bytes(gzip.compress(caches.encode(), 6, mtime=0))


def _caches(inside: Any) -> dict[str, Any]:
    import cases

    found: dict[str, Any] = {}
    for family in cases.FAMILIES:
        for plan, mode, result in cases.results_of(family, inside):
            logits = result.pop("logits", None)
            if logits is not None:
                result["logits"] = {
                    "digest": _digest(logits.contiguous().numpy().tobytes()),
                    "shape": list(logits.shape),
                    "first of each row": [[float(x) for x in row] for row in logits[:, -1, :4]],
                }
            found[f"{family}: {plan}: {mode}"] = result
    return found


def _inside(tree: Path) -> Any:
    """The module `inside.py` of a tree; this one's where the tree is older than the net."""
    own = tree / "tests" / "net" / "inside.py"
    spec = importlib.util.spec_from_file_location("inside", own if own.exists() else HERE / "inside.py")
    assert spec is not None and spec.loader is not None
    inside = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(inside)
    return inside


def _texts(inside: Any, tree: Path) -> Iterator[tuple[str, str]]:
    import cases
    from click.testing import CliRunner

    import kvtailor
    from kvtailor.cli import main

    def said(*words: str) -> str:
        return f"$ kvtailor {' '.join(words)}\n{CliRunner().invoke(main, words).output}\n"

    yield "names.txt", "".join(f"{name}{_signature(getattr(kvtailor, name))}\n" for name in sorted(kvtailor.__all__))
    yield "help.txt", "".join(said(*words, "--help") for words in _commands(main))
    plans = ((plan, kvtailor.Plan.parse(plan)) for plan in cases.PLANS)
    yield (
        "plans.txt",
        "".join(f"{plan}\n  {parsed}\n{parsed.to_toml()}\n{said('show', plan)}" for plan, parsed in plans) + said("ls"),
    )
    for folder in (HERE / "records", *sorted(each.parent for each in tree.glob("docs/records/*/records.jsonl.gz"))):
        pages = inside.pages(folder) | {f"terminal-{width}.txt": inside.printed(folder, width) for width in (80, 160)}
        for name, text in pages.items():
            yield f"{folder.name}__{name}", text
    # A tree from before has no such pages.
    if hasattr(inside, "leaderboards"):
        for name, text in inside.leaderboards(sorted(tree.glob("docs/records/*-field"))).items():
            yield f"every-model__{name}", text


def _signature(found: Any) -> str:
    """What a public name is called with; nothing for what has no signature, such as an error."""
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(found)))
    except (TypeError, ValueError):
        return ""


def _commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and subcommand below a group of click, the group first."""
    import click

    yield words
    if isinstance(group, click.Group):
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            yield from _commands(command, (*words, name))


def differences(old: Path, new: Path) -> list[str]:
    """Return what differs between two folders that `write` made, a few lines for each file or case."""
    found = []
    names = {path.name for folder in (old, new) for path in folder.iterdir()}
    for name in sorted(names):
        one, two = (folder / name for folder in (old, new))
        if not one.exists() or not two.exists():
            found.append(f"{name}: only on the {'new' if two.exists() else 'old'} side")
        elif name == "caches.json.gz":
            before, now = (json.loads(gzip.decompress(path.read_bytes())) for path in (one, two))
            found += _differing(before, now)
        elif one.read_bytes() != two.read_bytes():
            lines = [path.read_text(encoding="utf-8").splitlines() for path in (one, two)]
            changed = [line[:300] for line in difflib.unified_diff(*lines, n=0, lineterm="")][2:]
            found.append("\n".join([f"{name}: {len(changed)} changed lines", *(f"    {x}" for x in changed[:_SHOWN])]))
    return found


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for case in sorted(old.keys() | new.keys()):
        if case not in old or case not in new:
            found.append(f"{case}: only on the {'new' if case in new else 'old'} side")
        elif old[case] != new[case]:
            found.append("\n".join([f"{case}:", *(f"    {x}" for x in list(_paths(old[case], new[case]))[:_SHOWN])]))
    return found


def _paths(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """What differs inside of two trees of JSON, by its path."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _paths(old.get(name), new.get(name), f"{where}/{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, two) in enumerate(zip(old, new, strict=True)):
            yield from _paths(one, two, f"{where}/{place}")
    elif old != new:
        yield f"{where}: {old!r} -> {new!r}"


def compare(old: str, new: str | None) -> list[str]:
    """Return what differs between two commits; `new` None: the working tree."""
    with tempfile.TemporaryDirectory(prefix="net-") as place:
        made = []
        for name, commit in (("old", old), ("new", new)):
            tree = ROOT if commit is None else _checkout(commit, Path(place) / f"{name}-tree")
            made.append(_written(tree, Path(place) / name))
        return differences(*made)


def _checkout(commit: str, tree: Path) -> Path:
    """The files of a commit, with kernels that were built from its sources."""
    tree.mkdir()
    packed = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", tree], check=True, input=packed.stdout)
    built = sorted((ROOT / "src").rglob("kernels_*.so"))
    if built and _sources(tree) == _sources(ROOT):
        home = next((tree / "src").rglob("*.cpp")).parent
        for path in built:
            shutil.copy2(path, home)
    else:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return tree


def _sources(tree: Path) -> dict[str, str]:
    paths = [path for ending in ("*.cpp", "*.h") for path in (tree / "src").rglob(ending)]
    return {path.name: _digest(path.read_bytes()) for path in paths}


def _written(tree: Path, to: Path, implementation: str | None = None) -> Path:
    """What a tree gives, written by a process of its own that imports the tree's package."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("COLUMNS", "KVTAILOR_IMPLEMENTATION"):
        environment.pop(name, None)
    if implementation is not None:
        environment["KVTAILOR_IMPLEMENTATION"] = implementation
    words = ["write", str(to), "--tree", str(tree)]
    subprocess.run([sys.executable, str(HERE / "net.py"), *words], env=environment, check=True)
    return to


def golden(written: Path) -> dict[str, str]:
    """Return what of a written folder no processor changes: a fact for each cache, and digests of texts."""
    caches = json.loads(gzip.decompress((written / "caches.json.gz").read_bytes()))
    facts = {case: _facts(result) for case, result in caches.items()}
    texts = {path.name: _digest(path.read_bytes()) for path in sorted(written.iterdir()) if path.suffix != ".gz"}
    return facts | texts


def _facts(result: Mapping[str, Any]) -> str:
    """A digest of all that was held, and of the last state the tokens and the bytes; or of a refusal its digest."""
    if "refused" in result:
        return f"refused {_digest(result['refused'].encode())}"
    last = result["states"][-1]["ledger"]
    return f"{_digest(json.dumps(result['states'], sort_keys=True).encode())} {last['held']:.4g}:{last['total']}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


# Texts that are committed whole, so that a change of them is read where it is committed.
_WHOLE = ("names.txt", "records__report.md", "records__terminal-80.txt")


def write_goldens(to: Path = GOLDENS) -> None:
    """Write the goldens of the working tree: what comes out the same by the kernels and by the plain forms."""
    with tempfile.TemporaryDirectory(prefix="net-") as place:
        made = [_written(ROOT, Path(place) / (name or "auto"), name) for name in (None, "reference")]
        first, second = (golden(each) for each in made)
        stable = {name: fact for name, fact in first.items() if second[name] == fact}
        to.mkdir(exist_ok=True)
        lines = [f"{fact}  {name}\n" for name, fact in sorted(stable.items())]
        (to / "facts.txt").write_text("".join(lines), encoding="utf-8")
        for name in _WHOLE:
            shutil.copy2(made[0] / name, to / name)
    print(f"{len(stable)} of {len(first)} facts do not depend on the form of the kernels")


def check() -> list[str]:
    """Return what differs between the working tree and its goldens."""
    lines = (GOLDENS / "facts.txt").read_text(encoding="utf-8").splitlines()
    expected = {name: fact for fact, _, name in (line.partition("  ") for line in lines)}
    with tempfile.TemporaryDirectory(prefix="net-") as place:
        written = _written(ROOT, Path(place) / "new")
        found = golden(written)
        other = [f"{name}: {fact} -> {found.get(name)}" for name, fact in expected.items() if found.get(name) != fact]
        whole = Path(place) / "whole"
        whole.mkdir()
        for name in _WHOLE:
            shutil.copy2(written / name, whole / name)
        shutil.copy2(GOLDENS / "facts.txt", whole / "facts.txt")
        return other + differences(GOLDENS, whole)


def main() -> None:
    """Read the command line; see the top of this file."""
    parser = argparse.ArgumentParser(description="Goldens under a restructuring; see the first lines of this file.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    two = verbs.add_parser("compare")
    two.add_argument("old")
    two.add_argument("new", nargs="?")
    verbs.add_parser("check")
    verbs.add_parser("golden")
    one = verbs.add_parser("write")
    one.add_argument("to", type=Path)
    one.add_argument("--tree", type=Path, default=ROOT)
    given = parser.parse_args()
    if given.verb == "write":
        write(given.to, given.tree)
    elif given.verb == "golden":
        write_goldens()
    else:
        found = compare(given.old, given.new) if given.verb == "compare" else check()
        for each in found[:_SHOWN]:
            print(each)
        print(f"{len(found)} differences" if found else "nothing differs")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
