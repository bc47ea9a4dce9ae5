"""How the cost of a bench grows with its plans, where they share a text's prefill and where each has its own.

    python -m benchmarks.shared_prefill MODEL TEXT [--plans 1,5,15,45] [--windows 1] [--tasks perplexity] [--out FILE]

For each number of plans `kvtailor bench` runs twice in processes of its own, `--share on` and `--share off`, float32,
windows of 1,024 + 256 tokens or needles of 1,024. Printed are processor seconds, their ratio, the peak of resident
memory and how many bytes and losses differ between the two; each is in the JSON file too. The first plan is always
`full`, of which the sanity checks read the text by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from kvtailor.bench.schema import latest, read_records

METHODS = (
    "snapkv",
    "tova",
    "knorm",
    "keydiff",
    "streaming",
    "h2o",
    "expected",
    "snapkv + adakv",
    "lagkv",
    "cur",
    "position",
)
SHARES = (0.25, 0.5, 0.125, 0.75)
PLANS = ("full", *(f"{method} @ keep={share}" for share, method in product(SHARES, METHODS)))


def run(arguments: argparse.Namespace, count: int, share: str) -> dict[str, Any]:
    """Return processor seconds, peak bytes, and what was measured of each plan, of one bench of `count` plans."""
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-m", "kvtailor", "bench", "--model", arguments.model, "--dtype", "float32"]
        words += ["--plans", "; ".join(PLANS[:count]), "--tasks", arguments.tasks, "--share", share, "--out", out]
        many = str(arguments.windows)
        if arguments.tasks == "needle":
            words += ["--needles", "1024", "--depths", "0.5", "--documents", many]
        else:
            words += ["--text", arguments.text, "--context", "1024", "--continuation", "256", "--windows", many]
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"the bench of {count} plans with --share {share} ended with status {status}")
        measured = {
            record.plan: (record.bytes_held, record.metrics, {name: list(each) for name, each in record.values.items()})
            for record in latest(read_records(Path(out)))
        }
    return {"seconds": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss * 1024, "measured": measured}


def main() -> None:
    """Measure, print a row for each number of plans, and write all of it where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--plans", default="1,5,15,45")
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--tasks", choices=("perplexity", "needle"), default="perplexity")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for count in map(int, arguments.plans.split(",")):
        own, shared = run(arguments, count, "off"), run(arguments, count, "on")
        differ = sum(own["measured"][plan] != shared["measured"].get(plan) for plan in own["measured"])
        row = {"plans": count, "differ": differ}
        row |= {
            f"{side}_{name}": each[name]
            for side, each in (("own", own), ("shared", shared))
            for name in ("seconds", "peak")
        }
        rows.append(row | {"ratio": own["seconds"] / shared["seconds"]})
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"tasks": arguments.tasks, "windows": arguments.windows, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
