"""Draws a terminal in which a command has run, for README.

    python docs/draw_terminal.py kvtailor bench --plans "turboquant3; snapkv @ keep=0.25" --documents 5 ...

Runs the command as it stands and writes docs/pictures/terminal.svg: the command, and the first lines of what it
printed but for progress.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parent / "pictures" / "terminal.svg"
WIDTH, LINES = 80, 19


def main() -> None:
    """Runs, draws and writes."""
    words = sys.argv[1:]
    beside = Path(sys.executable).parent / words[0]
    done = subprocess.run(
        [str(beside), *words[1:]], env={**os.environ, "COLUMNS": str(WIDTH)}, capture_output=True, text=True, check=True
    )
    said = done.stdout.rstrip().splitlines()
    # Progress first, a paragraph for each cell; then what was found.
    last = max((i for i, line in enumerate(said) if line.startswith("[")), default=-1)
    found = next((i for i in range(last + 1, len(said)) if not said[i].strip()), last)
    said = said[found + 1 :][:LINES]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print(Text("$ " + shlex.join(words), style="bold green"))
        for line in said:
            console.print(Text(line))
        # One id for every run, so that the file changes with what it shows alone.
        svg = console.export_svg(title="kvtailor", theme=DIMMED_MONOKAI, unique_id="terminal")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
