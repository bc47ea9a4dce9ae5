"""Every model of transformers' mappings, tiny, against its recorded verdict in `docs/models.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import transformers

from tests.support.every_model.judge import DIFFERS, REFUSED, WORKS, Verdict, judge
from tests.support.every_model.pairs import Pair, every_pair
from tests.support.every_model.run import judged

DATA = json.loads((Path(__file__).parents[3] / "docs" / "models.json").read_text(encoding="utf-8"))
COLUMN = ".".join(transformers.__version__.split(".")[:2])
RECORDED = {Pair(row["mapping"], row["type"], row["class"]): row[COLUMN] for row in DATA["pairs"] if COLUMN in row}
PARTS = 6
# Each is the quickest of its kind: plain, windows, sinks, shared keys, states, an encoder-decoder's decoder, and what
# is refused by its configuration, by its attention, and for lack of a cache.
SAMPLE = ("llama", "gemma3_text", "gpt_oss", "gemma3n_text", "lfm2", "stablelm", "bloom", "mamba", "openai-gpt", "udop")


def not_as_recorded(found: Iterable[Verdict]) -> list[str]:
    """What is not as it was recorded, a line for each."""
    lines = []
    for verdict in found:
        pair = Pair(verdict.mapping, verdict.model_type, verdict.model_class)
        wanted = RECORDED.get(pair)
        if wanted is None:
            lines.append(f"{pair}: not yet judged, and {verdict.verdict} {verdict.reason}")
        elif verdict.verdict != wanted[0] or (verdict.verdict == REFUSED and [verdict.reason] != wanted[1:]):
            lines.append(f"{pair}: {verdict.verdict} {verdict.reason}, and recorded was {' '.join(wanted)}")
    return lines


@pytest.mark.skipif(not RECORDED, reason=f"transformers {COLUMN} is not yet judged")
@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_quick_family_is_as_recorded(model_type: str) -> None:
    pairs = [pair for pair in every_pair() if pair.model_type == model_type]
    assert pairs, f"transformers has no {model_type}"
    assert not_as_recorded([judge(pairs[0])]) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not RECORDED, reason=f"transformers {COLUMN} is not yet judged")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_is_as_recorded(part: int) -> None:
    assert not_as_recorded(judged(every_pair()[part::PARTS])) == []


def test_a_wrong_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself: a cache that loses its oldest tokens is no full one, and its verdict says by how much."""
    import kvtailor

    pair = next(pair for pair in every_pair() if pair.model_type == "llama")
    make = kvtailor.cache_for
    worse = {"full": "position(sinks=0) @ tokens=8"}
    monkeypatch.setattr(kvtailor, "cache_for", lambda model, plan: make(model, worse.get(str(plan), plan)))
    found = judge(pair)
    assert (found.verdict, found.where) == (DIFFERS, "full")
    monkeypatch.undo()
    assert judge(pair).verdict == WORKS
