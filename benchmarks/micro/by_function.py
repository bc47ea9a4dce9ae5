"""Where the host's time of a decoded token goes: own time by function, beside the base's own time in the same one.

The profiler is Python's cProfile, which sees functions of Python and of C. It adds its own time to each call, so a
function that makes many small calls looks longer than it is. Read the order, and how often each is called; times of a
token are those of the table that was measured without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from cProfile import Profile
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import kvtailor
from benchmarks.micro.tables import Advance
from benchmarks.micro.timer import Side

__all__ = ["MOST", "Spent", "functions_of", "told"]

MOST = 30
"""Functions that are shown of a plan."""
_OURS = Path(kvtailor.__file__).parent
_ARGUMENTS = 4
_ADDRESS = re.compile(r" (object )?at 0x[0-9a-f]+")


class Spent(NamedTuple):
    """What a function took in all profiled tokens: seconds without those of the functions it called, and calls."""

    seconds: float
    calls: int


def functions_of(side: Side, tokens: int, advance: Advance) -> dict[str, Spent]:
    """Return what each function took in so many further tokens of a side.

    Args:
        side: its `run` decodes a token.
        tokens: how many.
        advance: called with the side's name after each.
    """
    profile = Profile()
    for _ in range(tokens):
        profile.enable()
        side.run(0)
        profile.disable()
        advance(side.name)
    found: dict[str, Spent] = {}
    for entry in profile.getstats():
        name = _label(entry.code)
        before = found.get(name, Spent(0.0, 0))
        found[name] = Spent(before.seconds + entry.inlinetime, before.calls + entry.callcount)
    return found


def told(
    name: str, ours: Mapping[str, Spent], base: Mapping[str, Spent], *, tokens: int, layers: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the lines of a profile and the same as JSON values: `MOST` functions, most time above the base first.

    Args:
        name: of the plan.
        ours: of the plan, `functions_of`.
        base: of transformers' own cache.
        tokens: that both were profiled for.
        layers: of the model; times and calls are those of one token and layer.
    """
    share = tokens * layers
    rows: list[dict[str, Any]] = []
    for function, spent in ours.items():
        of_base = base.get(function, Spent(0.0, 0))
        rows.append(
            {
                "function": function,
                "own_us": 1e6 * spent.seconds / share,
                "base_us": 1e6 * of_base.seconds / share,
                "calls": spent.calls / share,
                "base_calls": of_base.calls / share,
            }
        )
    rows.sort(key=lambda row: (row["base_us"] - row["own_us"], row["function"]))
    total, of_base_in_all = (1e6 * sum(each.seconds for each in found.values()) / share for found in (ours, base))
    lines = [
        "",
        f"time by function, {name}, a token and layer: {total:.0f} us under the profiler, {of_base_in_all:.0f} of "
        f"DynamicCache; the {min(MOST, len(rows))} of {len(rows)} functions that take most above it",
        "      own   of DynamicCache    calls",
    ]
    lines += [
        f"{row['own_us']:9.2f} {row['base_us']:17.2f} {row['calls']:8.2f}  {row['function']}" for row in rows[:MOST]
    ]
    return lines, rows[:MOST]


def _label(code: CodeType | str) -> str:
    """A function of ours by its file below `src/kvtailor`, others by the last two parts of their file.

    What a dataclass writes for itself has no file, and is told apart by its arguments.
    """
    if isinstance(code, str):
        return _ADDRESS.sub("", code)
    if code.co_filename.startswith("<"):
        arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        shown = [*arguments[:_ARGUMENTS], *(["..."] if len(arguments) > _ARGUMENTS else [])]
        return f"({code.co_filename} {code.co_name}({', '.join(shown)}))"
    path = Path(code.co_filename)
    if path.is_relative_to(_OURS):
        return f"{path.relative_to(_OURS)}:{code.co_firstlineno} {code.co_qualname}"
    return f"({'/'.join(path.parts[-2:])}:{code.co_firstlineno} {code.co_qualname})"
