"""Running steps, one process for each, until their time is up."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.folder import Folder
from benchmarks.gpu_day.steps import Step

__all__ = ["ROOT", "run"]

ROOT = Path(__file__).resolve().parents[2]
# A tool's limit is final, so the last step is cut a little early.
_RESERVE = 15.0
_TAIL = 4000


def run(
    folder: Folder,
    steps: Sequence[Step],
    *,
    limit: float,
    again: bool = False,
    say: Callable[[str], None] = print,
    interpreter: str = sys.executable,
) -> bool:
    """Run the steps that are not done, in order, and return whether none is left.

    Args:
        folder: gets a record of each.
        steps: of one piece, or of all.
        limit: seconds for all of them. A step that is thought to take longer than what is left does not begin, and one
            that takes longer than that is ended, and is left for another time, unless it had the whole call.
        again: failed steps run again, too.
        say: gets a line about each step.
        interpreter: a Python that has torch.
    """
    begun, ran = time.monotonic(), 0
    for step in steps:
        status = folder.status(step.name)
        if status == "done" or (status == "failed" and not again):
            say(f"{step.name}: {status} before")
            continue
        left = limit - (time.monotonic() - begun) - _RESERVE
        # The first of a call begins in any case: there will never be more time than now.
        if left < step.seconds and ran:
            say(f"{step.name}: left, it is thought to take {step.seconds} s and {max(0, left):.0f} s are left")
            return False
        say(f"{step.name}: begun, {step.about}; thought to take {step.seconds} s")
        record, said = _one(step, max(left, 1.0), interpreter)
        if record["status"] == "left" and ran:
            say(f"{step.name}: ended after {record['seconds']:.0f} s, and left for another time")
            return False
        if record["status"] == "left":
            record |= {"status": "failed", "reason": f"it had a call of {left:.0f} s for itself and did not end"}
        ran += 1
        folder.add(record, said)
        say(f"{step.name}: {record['status']} in {record['seconds']:.0f} s" + _why(record))
    return all(folder.status(step.name) != "left" for step in steps)


def _why(record: dict[str, Any]) -> str:
    return "" if record["status"] == "done" else f": {record['reason']}"


def _one(step: Step, limit: float, interpreter: str) -> tuple[dict[str, Any], str]:
    """The record of a step, and what its command printed."""
    with tempfile.TemporaryDirectory(prefix="kvtailor-gpu-day-") as scratch:
        words = list(step.words)
        if step.kind == "tests":
            words += [f"--junitxml={scratch}/tests.xml"]
            # Compiling a variant takes a second of one core.
            words += ["-n", "8"] if find_spec("xdist") and not _interpreted(step) else []
        elif step.kind == "records":
            words += ["--out", scratch]
        begin, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        code, said = _called([interpreter, *words], _environment(step), limit)
        seconds = time.monotonic() - begin
        record: dict[str, Any] = {
            "step": step.name,
            "piece": step.piece,
            "started": started,
            "seconds": round(seconds, 1),
            "command": " ".join(words),
            "environment": dict(step.environment),
            "exit": code,
            "reason": None,
        }
        if code is None:
            return {**record, "status": "left"}, said
        try:
            found = _found(step, said, Path(scratch))
        except (OSError, ValueError, ElementTree.ParseError) as error:
            found = None
            record["reason"] = f"exit status {code}, and no result could be read ({error}): {_last_line(said)}"
        if found is not None and code != 0:
            record["reason"] = f"exit status {code}: {_last_line(said)}"
        record["status"] = "done" if found is not None and code == 0 else "failed"
        return {**record, **(found or {})}, said


def _interpreted(step: Step) -> bool:
    return ("TRITON_INTERPRET", "1") in step.environment


def _environment(step: Step) -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing can be fetched on such a machine, and looking for it takes time.
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **fixed, **dict(step.environment)}


def _called(words: Sequence[str], environment: dict[str, str], limit: float) -> tuple[int | None, str]:
    """Exit status, None where the time was up, and what was printed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        # A group of its own, so that what the command has started ends with it; but no session of its own, since a
        # device tool ends what is left of a command, sessions that it does not know apart.
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        code: int | None
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        return code, printed.read()


def _end_with_parent() -> None:
    """Ask the system to end this process when the runner is killed: the GPU must be free for the next call."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _found(step: Step, said: str, scratch: Path) -> dict[str, Any]:
    """What a step has left.

    Raises:
        ValueError: nothing, or nothing that can be read.
    """
    if step.kind == "tests":
        return {"tests": _tests(scratch / "tests.xml")}
    if step.kind == "records":
        records = [json.loads(line) for path in sorted(scratch.glob("records-*.jsonl")) for line in path.open()]
        if not records:
            raise ValueError("the bench wrote no record")
        return {"bench_records": records}
    found = next((line for line in reversed(said.splitlines()) if line.startswith("{")), None)
    if found is None:
        raise ValueError("it printed no JSON")
    told: dict[str, Any] = json.loads(found)
    return told


def _tests(path: Path) -> dict[str, Any]:
    """Counts, and the names of those that failed."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    if not cases:
        raise ValueError("no test ran")
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said[-_TAIL:].splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
