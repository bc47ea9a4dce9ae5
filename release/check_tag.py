"""Refuse a release whose tag, version, CHANGELOG and CITATION disagree, or that has an address that is a placeholder.

    python release/check_tag.py v0.2.0

Exit code 1 with one sentence for each fault. docs/releasing.md has the order of steps.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "example.org/OWNER"
# The files that have an address of the repository.
ADDRESSED = ("pyproject.toml", "CITATION.cff", "SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml")
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
UNRELEASED = "Unreleased"


def version_of(root: Path) -> str:
    """`__version__` of the package's sources."""
    tree = ast.parse((root / "src" / "kvtailor" / "version.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    return str(ast.literal_eval(value))


def headings(root: Path) -> list[str]:
    """The versions of CHANGELOG.md, newest first, `Unreleased` among them."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## (\S+)", text, re.MULTILINE)


def cited(root: Path) -> str | None:
    """The version that CITATION.cff has."""
    found = re.search(r"^version: \"?([^\s\"]+)", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def disagreements(root: Path) -> Iterator[str]:
    """What holds at every commit: a version in development has notes under `Unreleased`, a released one its own."""
    version, heads = version_of(root), headings(root)
    newest = heads[0] if heads else None
    if re.fullmatch(rf"{VERSION.pattern}\.dev\d+", version):
        if newest != UNRELEASED:
            yield f"version.py has {version}, so CHANGELOG.md begins with '## {UNRELEASED}'; found {newest}"
    elif not VERSION.fullmatch(version):
        yield f"version.py has {version}: write MAJOR.MINOR.PATCH, with .dev0 behind it before the release"
    elif newest != version:
        yield f"version.py has {version}, so CHANGELOG.md begins with '## {version}'; found {newest}"
    released = version.partition(".dev")[0]
    if cited(root) != released:
        yield f"version.py has {version}, so CITATION.cff has the version {released}; found {cited(root)}"


def faults(root: Path, tag: str) -> Iterator[str]:
    """What keeps a tag from being released, a sentence for each."""
    version = version_of(root)
    if ".dev" in version:
        yield f"version.py has {version}: a version in development is not released"
    elif tag != f"v{version}":
        yield f"the tag is {tag} and version.py has {version}: the tag of this version is v{version}"
    yield from disagreements(root)
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    for name in ADDRESSED:
        if PLACEHOLDER in (root / name).read_text(encoding="utf-8"):
            yield f"{name} has the placeholder {PLACEHOLDER}: write the address of the repository"
    for name, address in urls.items():
        if not address.startswith("https://"):
            yield f"pyproject.toml: the address {name} is {address}; it begins with https://"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python release/check_tag.py vX.Y.Z", file=sys.stderr)
        return 2
    found = list(faults(ROOT, sys.argv[1]))
    for fault in found:
        print(f"check_tag: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
