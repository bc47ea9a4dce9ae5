"""How much longer a command takes beside one busy core than alone.

The command runs alone and beside a loop that keeps one core busy, in turns, so that what else happens on the machine
meets both. The loop is pinned to the first core that this process may use. What the command prints goes nowhere.

    python -m benchmarks.busy .venv/bin/kvtailor run --prompt-file README.md --max-new-tokens 64
    python -m benchmarks.busy --rounds 2 make demo
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

_LOOP = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True:\n    pass\n"


def seconds_of(command: list[str]) -> float:
    """Wall-clock seconds of one run.

    Raises:
        SystemExit: the command failed, so that its time means nothing.
    """
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.decode()[-2000:]}")
    return time.perf_counter() - began


def beside_a_busy_core(command: list[str]) -> float:
    """The same while a loop keeps one core busy."""
    loop = subprocess.Popen([sys.executable, "-c", _LOOP])
    try:
        return seconds_of(command)
    finally:
        loop.kill()
        loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.command:
        parser.error("give a command to run")
    quiet, busy = [], []
    for number in range(given.rounds):
        load = os.getloadavg()[0]
        quiet.append(seconds_of(given.command))
        busy.append(beside_a_busy_core(given.command))
        print(
            f"round {number + 1}: alone {quiet[-1]:.1f} s, beside a busy core {busy[-1]:.1f} s, load before {load:.1f}"
        )
    alone, beside = statistics.median(quiet), statistics.median(busy)
    print(f"medians: alone {alone:.1f} s, beside a busy core {beside:.1f} s, {beside / alone:.2f} times as long")


if __name__ == "__main__":
    main()
