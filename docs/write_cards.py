"""Writes `docs/cards/`: three plan cards, from the records of real models in `docs/records/`.

    python docs/write_cards.py

A test compares the committed cards with what this file makes of the records.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from kvtailor.bench.card import Card, make_card  # noqa: E402
from kvtailor.bench.schema import read_records  # noqa: E402
from kvtailor.plan import Plan  # noqa: E402

__all__ = ["CARDS", "FOLDER", "made"]

FOLDER = ROOT / "docs" / "cards"
_K8V4 = "kivi(key_bits=8, value_bits=4, recent=32)"
CARDS = {
    "smollm2-135m-k8v4": ("smollm2-135m", _K8V4),
    "smollm2-135m-snapkv-quarter": ("smollm2-135m", "snapkv + adakv @ keep=0.25"),
    "qwen2.5-coder-0.5b-k8v4": ("qwen2.5-coder-0.5b", _K8V4),
}
"""For each folder the records and the plan."""


def made(name: str) -> Card:
    """Return a card of this list."""
    records, plan = CARDS[name]
    return make_card(Plan.parse(plan), read_records(ROOT / "docs" / "records" / records))


if __name__ == "__main__":
    for each in CARDS:
        print(made(each).save(FOLDER / each))
