"""Chunks and thresholds in kvpress, and ours under the same hyper-parameters; see `kvpress_kept.md`."""

from __future__ import annotations

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
