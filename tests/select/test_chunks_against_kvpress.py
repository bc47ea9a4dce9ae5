"""Chunks and thresholds in kvpress, and ours under the same hyper-parameters; see `kvpress_kept.md`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tests.kvpress_cases import Pairing, cases, each_pairing, left
from torch import Tensor

from kvtailor.plan import Plan
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

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


@dataclass(frozen=True, kw_only=True)
class Together(Scorer):
    """Every kv head gets the mean of what `each` says of all of them."""

    each: Scorer

    @property
    def needs(self) -> Needs:
        return self.each.needs

    @property
    def recents(self) -> int:
        return self.each.recents

    def score(self, held: Held) -> Tensor:
        scores = self.each.score(held)
        return scores.mean(1, keepdim=True).expand_as(scores).clone()


def test_heads_that_choose_together_choose_as_kvpress_does() -> None:
    """kvpress ranks chunks by the sum over kv heads, where each of ours ranks its own (*Departs*)."""
    case = cases()["chunks l20 three-heads"]
    plan = Pairing(case=case.name, plan="snapkv(window=8, kernel=5) + chunks(size=20)").made(60)
    assert isinstance(plan.score, Scorer)
    for theirs in case.kept.values():
        tokens = int(theirs.sum(-1).max())
        together = Plan(score=Together(each=plan.score), select=plan.select, tokens=tokens)
        assert torch.equal(left(together, case.geometry), theirs)
        assert not torch.equal(left(replace(plan, tokens=tokens), case.geometry), theirs)
