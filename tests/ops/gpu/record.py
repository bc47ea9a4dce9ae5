"""Ceilings of what `compiled` prints, written beside this file."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import triton

if __name__ == "__main__":
    ceilings = {}
    for line in sys.stdin:
        made = json.loads(line)
        assert made["stack"] == made["local"] == 0, made
        ceilings[f"{made['name']} {made['sm']}"] = {
            "registers": min(255, math.ceil(1.1 * made["registers"])),
            "instructions": math.ceil(1.1 * made["instructions"]),
            "loop": math.ceil(1.1 * made["loop"]),
            "mma": made["mma"],
            "asynchronous": made["asynchronous"],
        }
    recorded = {"triton": triton.__version__, "ceilings": ceilings}
    text = json.dumps(recorded, indent=1, sort_keys=True) + "\n"
    (Path(__file__).parent / "ceilings.json").write_text(text, encoding="utf-8")
