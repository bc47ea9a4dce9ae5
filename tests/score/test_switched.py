"""Switched: which of the two scores has its turn, with which evidence, in a model that reads and writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_by, make_row
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.score.h2o import H2O
from kvtailor.score.snapkv import SnapKV
from kvtailor.score.switched import Switched


def test_each_gets_its_turn_and_no_more_evidence_than_it_declares() -> None:
    scorer = Switched(prompt=SnapKV(window=3), decoding=SnapKV(window=11))
    assert scorer.needs.window == 11 and scorer.recent == 11
    generator = torch.Generator().manual_seed(2)
    held = held_by(scorer, [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40)])
    for decoding, window in ((False, 3), (True, 11)):
        now, alone = replace(held, decoding=decoding), SnapKV(window=window)
        expected = alone.score(held.within(alone.needs))
        assert torch.equal(scorer.score(now)[held.valid], expected[held.valid])
        assert torch.equal(scorer.attention_scale(now, group=2), alone.attention_scale(held, group=2))


def columns_after(plan: str, decoded: int, chunk: int | None = None) -> dict[int, torch.Tensor]:
    model, (ids, mask) = build("llama"), prompts((40, 33))
    cache = kvtailor.prefill(model, ids, mask, plan=plan, chunk=chunk)
    for index in range(decoded):
        token = torch.tensor([[3 + index], [40 + index]])
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        model(token, attention_mask=mask, **hand_cache(cache), position_ids=mask.sum(-1, keepdim=True) - 1)
    return held_columns(cache)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 16])
def test_prompts_go_by_the_first_and_decoded_tokens_by_the_second(chunk: int | None) -> None:
    """`position` keeps the newest alone. Right after the prompt nothing of it shows; after the first cut, all does."""
    plan = "switched(prompt=knorm, decoding=position(sinks=0)) @ tokens=16, slack=3"
    prompt = columns_after(plan, 0, chunk)
    for layer, columns in columns_after("knorm @ tokens=16, slack=3", 0, chunk).items():
        assert torch.equal(prompt[layer], columns)
    assert any(not columns[..., -16:].all() for columns in prompt.values())
    before, after = (columns_after(plan, count, chunk) for count in (3, 4))
    for layer in prompt:
        assert torch.equal(before[layer][..., :40], prompt[layer]), "it was cut before its slack was used"
        held = set(prompt[layer][0, 0].nonzero().flatten().tolist()) | {40, 41, 42, 43}
        assert after[layer][0, 0].nonzero().flatten().tolist() == sorted(held)[-16:]


@torch.no_grad()
def test_a_context_that_was_repeated_is_cut_by_another_score_while_decoding() -> None:
    plan = "switched(prompt=kvzip, decoding=position(sinks=0)) @ tokens=16, slack=3"
    prompt, after = (columns_after(plan, count) for count in (0, 4))
    for layer, columns in columns_after("kvzip + uniform @ tokens=16", 0).items():
        assert torch.equal(prompt[layer], columns)
    assert all(bool(columns[..., -4:].all()) and int(columns.sum(-1).max()) == 16 for columns in after.values())


@torch.no_grad()
def test_a_new_turn_is_a_prompt_again() -> None:
    model, (ids, _) = build("llama"), prompts((40,))
    turn = prompts((12,), state=5)[0]
    caches = [
        kvtailor.cache_for(model, f"{score} @ tokens=16")
        for score in (
            "switched(prompt=knorm, decoding=position)",
            "knorm",
        )
    ]
    for cache in caches:
        for new in (ids, turn[:, :1], turn[:, 1:]):
            model(new, **hand_cache(cache))
    one, other = (held_columns(cache) for cache in caches)
    assert all(torch.equal(one[layer], other[layer]) for layer in one)


def test_slack_and_plan() -> None:
    assert Switched(prompt=SnapKV(), decoding=SnapKV()).slack == 64
    assert Switched(prompt=SnapKV(), decoding=H2O()).slack == H2O().slack
    plan = Plan.parse("switched(prompt=snapkv(window=16), decoding=h2o) + adakv @ tokens=64")
    assert plan.score == Switched(prompt=SnapKV(window=16), decoding=H2O())


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("switched(prompt=atskv, decoding=knorm) @ keep=0.5", "looks back at its own"),
        ("switched(prompt=expected, decoding=expected(sinks=1)) @ keep=0.5", "leaves out the first 4 and the other 1"),
        ("switched(prompt=kvzip, decoding=kvzip_plus) @ keep=0.5", "repeated once"),
    ],
)
def test_refuses_scores_that_cannot_share_their_evidence(plan: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Plan.parse(plan)
