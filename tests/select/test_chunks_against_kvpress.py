"""Chunks and thresholds in kvpress, and ours under the same hyper-parameters; see `kvpress_kept.md`."""

from __future__ import annotations

import pytest
import torch
from tests.support.kvpress_cases import Pairing, cases, each_pairing, left

SELECTED = (
    Pairing(case="chunks l20 knorm one-head", plan="knorm + chunks(size=20)"),
    Pairing(
        case="chunks l10 snapkv one-head",
        plan="snapkv(window=8, kernel=5) + chunks(size=10)",
        apart=4,
        why="kvpress's window lifts the chunk that it ends, with two older tokens; ours spends these two elsewhere",
    ),
    Pairing(case="gated l10 knorm one-head", plan="knorm + gatedchunks"),
    Pairing(case="dms knorm", plan='knorm(recent=16) + threshold(at=-5.0, of="score")', tokens={0: 137}),
)


@each_pairing(*SELECTED)
def test_the_same_tokens_stay(pairing: Pairing) -> None:
    pairing.check_kept()


def test_heads_that_choose_together_choose_as_kvpress_does() -> None:
    """kvpress ranks chunks by the sum over kv heads, as `heads="all"` does; by default each of ours ranks its own."""
    case = cases()["chunks l20 three-heads"]
    words = "snapkv(window=8, kernel=5) + chunks(size=20{})"
    together, alone = (Pairing(case=case.name, plan=words.format(how)) for how in (', heads="all"', ""))
    for theirs in case.kept.values():
        tokens = int(theirs.sum(-1).max())
        assert torch.equal(left(together.made(tokens), case.geometry), theirs)
        assert not torch.equal(left(alone.made(tokens), case.geometry), theirs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gated l7 s2 keydiff ungrouped", "keydiff + gatedchunks(size=7, short=2{})"),
        ("gated l10 capkv three-heads", "capkv(sinks=0) + gatedchunks(size=10{})"),
    ],
)
def test_gated_chunks_of_all_heads_are_those_of_kvpress(name: str, words: str) -> None:
    case = cases()[name]
    together, alone = (Pairing(case=name, plan=words.format(how)) for how in (', heads="all"', ""))
    together.check_kept()
    for tokens, theirs in case.kept.items():
        assert not torch.equal(left(alone.made(tokens), case.geometry), theirs)
