"""The plan cards of real models are what the records say, and small."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvtailor.bench.card import Card
from kvtailor.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("write_cards", ROOT / "docs" / "write_cards.py")
assert SPEC is not None and SPEC.loader is not None
write_cards = importlib.util.module_from_spec(SPEC)
sys.modules["write_cards"] = write_cards
SPEC.loader.exec_module(write_cards)


@pytest.mark.parametrize("name", write_cards.CARDS)
def test_a_card_is_what_the_records_make_of_it(name: str, tmp_path: Path) -> None:
    folder = write_cards.FOLDER / name
    write_cards.made(name).save(tmp_path / name)
    for file in ("plan.toml", "card.json", "README.md"):
        expected = (tmp_path / name / file).read_text(encoding="utf-8")
        assert (folder / file).read_text(encoding="utf-8") == expected, f"{file}: run python docs/write_cards.py"
    assert sum(each.stat().st_size for each in folder.iterdir()) < 20_000
    assert Plan.load(folder) == Plan.parse(write_cards.CARDS[name][1]) == Plan.parse(Card.load(folder).plan)


def test_no_other_card_lies_there() -> None:
    assert {each.name for each in write_cards.FOLDER.iterdir() if each.is_dir()} == {*write_cards.CARDS}
