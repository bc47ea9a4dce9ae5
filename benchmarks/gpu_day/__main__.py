"""`make gpu-day PIECE=2 OUT=folder`; see docs/gpu-day.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_day.folder import Folder
from benchmarks.gpu_day.page import write_page
from benchmarks.gpu_day.run import run
from benchmarks.gpu_day.steps import PIECES, estimate, steps

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run a piece, and write the page; 0: all that was asked for is done, 3: something is left, 1: a step failed."""
    parser = argparse.ArgumentParser(prog="make gpu-day", description="Run what needs a GPU, in pieces that resume.")
    parser.add_argument("--piece", type=int, choices=range(1, PIECES + 1), help="Only this piece.  [all of them]")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the results; goes on there.")
    parser.add_argument("--before", type=Path, help="Results of earlier runs, from which this one goes on.")
    parser.add_argument("--limit", type=float, default=560.0, help="Seconds after which nothing more runs.")
    parser.add_argument("--again", action="store_true", help="Run failed steps again.")
    parser.add_argument("--rehearse", action="store_true", help="Tiny sizes, on the CPU, in Triton's interpreter.")
    parser.add_argument("--list", action="store_true", help="Show the steps, and run nothing.")
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help="Only this step.")
    asked = parser.parse_args(words)
    every = steps(rehearsal=asked.rehearse)
    unknown = [name for name in asked.only if name not in {step.name for step in every}]
    if unknown:
        parser.error(f"there is no step {unknown[0]!r}; there are {', '.join(step.name for step in every)}")
    folder = Folder(asked.out, asked.before)
    if folder.rehearsed is (not asked.rehearse):
        there = "a rehearsal" if folder.rehearsed else "a GPU"
        parser.error(f"{asked.out} has records of {there}: give another folder")
    wanted = [
        step
        for step in every
        if (asked.piece is None or step.piece == asked.piece) and (not asked.only or step.name in asked.only)
    ]
    if asked.list:
        for piece in range(1, PIECES + 1):
            print(f"piece {piece}, thought to take {estimate(piece)} s")
            for step in (each for each in wanted if each.piece == piece):
                print(f"  {step.name:26s} {step.seconds:4d} s  {folder.status(step.name):7s} {step.about}")
        return 0
    folder.write_state(every)

    def say(line: str) -> None:
        print(line, flush=True)
        # After each step, so that a run that is killed leaves a state and a page that are true.
        folder.write_state(every)
        write_page(folder, every)

    finished = run(folder, wanted, limit=asked.limit, again=asked.again, say=say)
    print(f"results: {folder.path}; the page: {folder.path / 'page.md'}")
    if not finished:
        print("something is left: the same command again goes on")
        return 3
    return int(any(folder.status(step.name) == "failed" for step in wanted))


if __name__ == "__main__":
    sys.exit(main())
