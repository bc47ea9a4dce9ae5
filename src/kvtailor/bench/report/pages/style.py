"""How pages look and what they do: plain CSS and plain scripts, written into the page itself."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["COLOURS", "DARK", "LIGHT", "browser_text", "style"]

LIGHT = {
    "ink": "#1c1e21",
    "paper": "#ffffff",
    "dim": "#5f6670",
    "rule": "#e3e6ea",
    "accent": "#1f6feb",
    "warm": "#9a4b00",
    "good": "#1a7f37",
    "soft": "#f6f8fa",
    "edge": "#c3c9d1",
    "strong": "#ffffff",
    "p0": "#0072b2",
    "p1": "#c04d00",
    "p2": "#00805f",
    "p3": "#b0457d",
    "p4": "#7a5ccc",
    "p5": "#8a6d00",
    "p6": "#2a8fc7",
    "pf": "#5f6670",
}
"""Colours on light paper. The plans' (p0 to p6, pf for 'full') are Okabe and Ito's, darkened until each stands out 3:1
from the paper."""

DARK = {
    "ink": "#e6e8eb",
    "paper": "#14171b",
    "dim": "#98a1ad",
    "rule": "#2c323a",
    "accent": "#6ea8fe",
    "warm": "#f0a35e",
    "good": "#56c271",
    "soft": "#1b1f25",
    "edge": "#363d47",
    "strong": "#14171b",
    "p0": "#56a8e6",
    "p1": "#f08a4b",
    "p2": "#2fbf95",
    "p3": "#e58fbf",
    "p4": "#b39ddb",
    "p5": "#e0c040",
    "p6": "#8fd3f4",
    "pf": "#98a1ad",
}
COLOURS = 7
"""How many plans have a colour of their own; then they come round, with dashed lines."""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_PLANS = "\n".join(f".p{i} {{ color: var(--p{i}); }}" for i in [*range(COLOURS), "f"])


def browser_text(name: str) -> str:
    """Return a file of `browser/`: a style sheet or a script, as it is written into a page.

    Args:
        name: of the file, such as "chart.js".
    """
    text = (files("kvtailor.bench.report.pages.browser") / name).read_text(encoding="utf-8")
    # The depth of a line and notes to who works on these files are no part of a page.
    return "".join(line.lstrip(" ") for line in text.splitlines(keepends=True) if not _is_note(line))


def _is_note(line: str) -> bool:
    """Whether a line of a script or a style sheet is a remark and nothing else."""
    text = line.strip()
    return text.startswith("//") or (text.startswith("/*") and text.endswith("*/"))


def style(*names: str) -> str:
    """Return the colours, light and dark, with the style sheet of every page and those that are named.

    Args:
        names: of further files of `browser/`, such as "pareto.css".
    """
    colours = (
        f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n{_PLANS}\n"
    )
    return colours + "".join(browser_text(name) for name in ("base.css", *names))
