"""Saved caches with one flipped bit, loaded and used in this process; run in a child, since a fault may end it."""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.seam.saving.test_saving import continued, saved

import kvtailor
from kvtailor.errors import CacheMisuse

PLANS = (
    "kivi(bits=4, group=8, recent=8)",
    "snapkv(window=6, kernel=5) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24",
    "h2o(recent=6) @ tokens=16, slack=3",
    "quest(tokens=16, dense_layers=1) + indexed(page=4)",
    "minicache(start=0.0, block_size=4, of=vector(bits=8, block_size=4))",
)


def flipped(data: bytes, chance: random.Random) -> tuple[bytes, int]:
    """One bit of the file, in its header as often as behind it, and the number of the byte."""
    end = 8 + int.from_bytes(data[:8], "little")
    at = chance.randrange(end) if chance.random() < 0.5 else chance.randrange(end, len(data))
    changed = bytearray(data)
    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed), at


def outcome(path: Path, model, mask, expected) -> str:
    """What came of a file: "refused" with one sentence, "harmless", "other answer", or what else was raised."""
    try:
        loaded = kvtailor.load_cache(model, path)
    except CacheMisuse as error:
        text = str(error)
        return "refused" if str(path) in text and "\n" not in text else f"refused in other words: {text}"
    except Exception as error:
        return f"raised {error!r}"
    try:
        found = continued(model, loaded, mask, steps=2)[1]
    except Exception as error:
        return f"raised when it was used: {error!r}"
    return "harmless" if torch.equal(found, expected) else "other answer"


def count(plans: Sequence[str], flips: int, folder: Path, source: Path | None = None) -> Counter[str]:
    """Outcomes of so many flips in a saved cache of each plan, or in the file `source` of the second."""
    warnings.simplefilter("ignore")
    outcomes: Counter[str] = Counter()
    for number, plan in enumerate(plans):
        good, bad = folder / "good.safetensors", folder / "bad.safetensors"
        # Without padding attention looks at no column before it reads the lanes.
        model, _, mask = saved("llama", plan, good, lengths=(40, 40))
        if source is not None:
            good = source
        expected = continued(model, kvtailor.load_cache(model, good), mask, steps=2)[1]
        data, chance = good.read_bytes(), random.Random(number)
        for _ in range(flips):
            changed, at = flipped(data, chance)
            bad.write_bytes(changed)
            print(f"byte {at} of {plan}", file=sys.stderr, flush=True)
            outcomes[outcome(bad, model, mask, expected)] += 1
    return outcomes


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    place = Path(asked["folder"])
    new = count(PLANS, asked["flips"], place)
    print(json.dumps([new, count(PLANS[1:2], asked["old_flips"], place, Path(asked["old"]))]))
