"""Print constraints.txt with the oldest transformers that pyproject.toml allows, for the tests of the workflows.

    python release/oldest_constraints.py > oldest.txt && make test CONSTRAINTS=oldest.txt

Packages that it needs older than they are pinned lose their pins: pip finds a version.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the oldest transformers bounds from above: 5.17 wants huggingface_hub below 2.
UNPINNED = ("huggingface_hub",)


def oldest(dependencies: list[str]) -> str:
    """The lowest version of transformers among a project's dependencies, with three numbers.

    Raises:
        ValueError: no dependency is `transformers>=VERSION`.
    """
    for each in dependencies:
        if found := re.fullmatch(r"transformers>=([\d.]+)(,.*)?", each.replace(" ", "")):
            return ".".join([*found[1].split("."), "0", "0"][:3])
    raise ValueError(f"no dependency is of the form transformers>=VERSION, found {dependencies}")


def constraints(pinned: str, version: str) -> str:
    """`pinned` with this version of transformers and without the pins of `UNPINNED`."""
    lines = [line for line in pinned.splitlines() if line.split("==")[0] not in UNPINNED]
    return "\n".join(f"transformers=={version}" if line.startswith("transformers==") else line for line in lines) + "\n"


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(constraints((ROOT / "constraints.txt").read_text(encoding="utf-8"), oldest(project["dependencies"])), end="")
