"""The folder of a GPU day: what was measured, what is done, and the page.

Five files, so that they fit what a device tool brings back: `records.jsonl` (one line for each step that ended),
`state.json` (what is done, what failed, what is left), `log.txt` (what the commands printed), `bars.json` and
`page.md`.
A line is written when its step has ended, so that a run that is killed loses that step alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.steps import Step

__all__ = ["Folder"]

_RECORDS, _STATE, _LOG = "records.jsonl", "state.json", "log.txt"


class Folder:
    """Where results lie.

    Args:
        path: made where it is not there.
        before: results of earlier runs, which this run goes on from; None, or the folder itself: only what is there.

    Raises:
        ValueError: a line of the records cannot be read, and is not the last one.
    """

    def __init__(self, path: Path, before: Path | None = None):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        if before is not None and before.resolve() != path.resolve():
            if not before.is_dir():
                raise ValueError(f"asked to go on from {before}, which is no folder: leave out FROM, or give another")
            for name in (_RECORDS, _LOG):
                if (before / name).is_file() and not (path / name).exists():
                    shutil.copyfile(before / name, path / name)
        self.records = self._read()

    def add(self, record: dict[str, Any], said: str) -> None:
        """Append a record, and what its command printed."""
        # What another process reads must be whole, and on the disk.
        with (self.path / _LOG).open("a", encoding="utf-8") as log:
            log.write(f"=== {record['step']}: {record['status']}, {record['seconds']:.0f} s\n{said}\n")
        with (self.path / _RECORDS).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        self.records.append(record)

    def last(self, step: str) -> dict[str, Any] | None:
        """The newest record of a step; None where there is none."""
        return next((record for record in reversed(self.records) if record["step"] == step), None)

    @property
    def rehearsed(self) -> bool | None:
        """Whether the records are of a rehearsal; None where there are none."""
        if not self.records:
            return None
        return any("TRITON_INTERPRET" in record["environment"] for record in self.records)

    def status(self, step: str) -> str:
        """ "done", "failed", or "left": no record is there."""
        found = self.last(step)
        return "left" if found is None else str(found["status"])

    def write_state(self, steps: Iterable[Step]) -> None:
        """Write `state.json`: every step with its piece, its status, and the seconds it took or is thought to take."""
        told = []
        for step in steps:
            found = self.last(step.name)
            told.append(
                {
                    "step": step.name,
                    "piece": step.piece,
                    "status": self.status(step.name),
                    "seconds": None if found is None else found["seconds"],
                    "estimate": step.seconds,
                    "about": step.about,
                }
            )
        self.write(_STATE, json.dumps({"steps": told}, indent=1) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replace a file in one go."""
        beside = self.path / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.path / name)

    def _read(self) -> list[dict[str, Any]]:
        path = self.path / _RECORDS
        if not path.is_file():
            return []
        lines, found = path.read_text(encoding="utf-8").splitlines(), []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                if number < len(lines):
                    raise ValueError(f"{path}, line {number} is no JSON ({error}): take the line out") from error
                # The run was killed while it wrote this one: its step runs again.
                self.write(_RECORDS, "".join(f"{each}\n" for each in lines[:-1]))
        return found
