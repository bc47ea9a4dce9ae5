"""`page.md` and `bars.json`: each bar beside what was measured, and what "auto" may take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_day.bars import BARS, Point
from benchmarks.gpu_day.folder import Folder
from benchmarks.gpu_day.readings import Readings
from benchmarks.gpu_day.steps import Step
from benchmarks.gpu_day.verdict import Outcome, outcomes

__all__ = ["write_page"]

_WORDS = {True: "yes", False: "**no**", None: "null"}


def write_page(folder: Folder, steps: Sequence[Step]) -> None:
    """Write both files anew, from the records alone.

    Args:
        folder: has the records, and gets the files.
        steps: all there are, for the list of what is left.
    """
    found = Readings.of(folder.records)
    rehearsed = folder.rehearsed is True
    told = [_told(point, found, rehearsed=rehearsed) for point in BARS]
    results = outcomes(Readings.of([]) if rehearsed else found)
    decided = {outcome.operation: outcome.won for outcome in results}
    values = {"rehearsal": rehearsed, "bars": told, "won": decided, "constant": _constant(results)}
    folder.write("bars.json", json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    lines = ["# A GPU day", "", *_machine(folder), ""]
    if rehearsed:
        lines += ["**A rehearsal: tiny sizes in Triton's interpreter. No time here says anything about a GPU.**", ""]
    measured = [each for each in told if each["met"] is not None]
    lines += [
        f"{len(measured)} of {sum(_is_bar(point) for point in BARS)} points of the bars were measured, "
        f"{sum(bool(each['met']) for each in measured)} of these are met.",
        "",
        "| bar | what | asked | measured | met |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(point, each) for point, each in zip(BARS, told, strict=True)]
    lines += ["", '## What "auto" may take', "", *_verdict(results), "", "## Steps", ""]
    lines += ["| piece | step | status | seconds | thought | |", "|---|---|---|---|---|---|"]
    lines += [_step(step, folder) for step in steps]
    lines += ["", *_tests(found), *_left_out(found)]
    folder.write("page.md", "\n".join(lines).rstrip() + "\n")


def _is_bar(point: Point) -> bool:
    return point.at_least is not None or point.at_most is not None


def _told(point: Point, found: Readings, *, rehearsed: bool) -> dict[str, Any]:
    value, met = point.measured(found), point.met(found)
    reason = point.reason or ("its step has not run, or left it out" if value is None else "")
    if rehearsed:
        value, met, reason = None, None, point.reason or "a rehearsal measures nothing"
    return {
        "bar": point.bar,
        "asks": point.asks,
        "at_least": point.at_least,
        "at_most": point.at_most,
        "measured": value,
        "met": met,
        "why_null": reason if value is None else None,
    }


def _line(point: Point, told: dict[str, Any]) -> str:
    asked = "–"
    if point.at_least is not None:
        asked = f"at least {point.at_least:g}"
    elif point.at_most is not None:
        asked = f"at most {point.at_most:g}"
    value = f"null: {told['why_null']}" if told["measured"] is None else f"{told['measured']:.3g}"
    met = _WORDS[told["met"]] if _is_bar(point) else "–"
    return f"| {point.bar} | {point.asks} | {asked} | {value} | {met} |"


def _machine(folder: Folder) -> list[str]:
    record = folder.last("machine")
    machine = (record or {}).get("machine") or {}
    if not machine:
        return ["The machine is not known: the step `machine` has not run."]
    shown = ("accelerator", "torch", "transformers", "python", "kvtailor", "commit", "processor", "cores")
    words = [f"{name} {machine[name]}" for name in shown if machine.get(name) is not None]
    rate = machine.get("read_bandwidth")
    return [", ".join(words) + ("." if rate is None else f"; a plain read gives {rate / 1e9:.0f} GB/s.")]


def _constant(results: Sequence[Outcome]) -> str:
    """The line of `ops/dispatch.py` that follows from what was found."""
    won = ", ".join(f'"{outcome.operation}"' for outcome in results if outcome.won)
    return f"WON_ON_CUDA: frozenset[str] = frozenset({{{won}}})" if won else "WON_ON_CUDA: frozenset[str] = frozenset()"


def _verdict(results: Sequence[Outcome]) -> list[str]:
    words = {True: "won", False: "not won", None: "not known, so not chosen"}
    lines = []
    for outcome in results:
        lines += [f"- `{outcome.operation}`: {words[outcome.won]}", *(f"  - {line}" for line in outcome.lines)]
    return [*lines, "", "The line of `src/kvtailor/ops/dispatch.py` that follows:", "", f"    {_constant(results)}"]


def _step(step: Step, folder: Folder) -> str:
    record = folder.last(step.name)
    seconds = "" if record is None else f"{record['seconds']:.0f}"
    about = step.about if record is None or not record["reason"] else f"{step.about}; {_cell(record['reason'])}"
    return f"| {step.piece} | {step.name} | {folder.status(step.name)} | {seconds} | {step.seconds} | {about} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _tests(found: Readings) -> list[str]:
    lines = []
    for name, counts in found.tests.items():
        lines.append(f"{name}: {counts['passed']} passed, {len(counts['failed'])} failed, {counts['skipped']} skipped.")
        lines += [f"- {case}" for case in counts["failed"]]
    return [*lines, ""] if lines else []


def _left_out(found: Readings) -> list[str]:
    """What the benches of whole models had no room for, or could not record."""
    lines = [
        f"- {table.removesuffix(', left out')}: {_cell(note.removeprefix('left out: '))}"
        for table, notes in found.tables.items()
        if table.endswith(", left out")
        for note in map(str, notes)
    ]
    return ["Sides that were left out:", "", *lines, ""] if lines else []
