"""LU-KV: budgets by a profile, and the profile itself against the definition by plain loops."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from tests.support.calibrated import tiny
from tests.support.seam.zoo import build, prompts
from transformers import DynamicCache

import kvtailor
from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.lukv import LUKV, pruned_at
from kvtailor.calibration.contract import Job
from kvtailor.calibration.lukv import LUKV as Profile
from kvtailor.calibration.lukv import _gains_of, best_split, relaxed
from kvtailor.calibration.passages import Passage, cut
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache
from kvtailor.score.expected import Expected
from kvtailor.types import Held

TEXT = "".join(
    f"{['the', 'a', 'one'][i % 3]} {['cat', 'dog', 'owl', 'fox', 'hen'][i * i % 5]} {i} " for i in range(900)
)


def profile(layers: int, heads: int) -> torch.Tensor:
    drawn = LUKV.example_calibration(
        layers=layers, heads=heads, group=2, size=4, generator=torch.Generator().manual_seed(1)
    )
    return drawn["pruned"]


def request(total: int, pruned: torch.Tensor, tokens: int, *, seen: int | None = None, **more: object) -> BudgetRequest:
    layers, heads = pruned.shape[:2]
    capacity = torch.full((1, layers, heads), tokens)
    return BudgetRequest(
        total=torch.tensor([total]),
        capacity=capacity,
        floor=torch.zeros_like(capacity),
        layers=tuple(range(layers)),
        num_layers=layers,
        row_tokens=None if seen is None else torch.tensor([seen]),
        calibration={"pruned": pruned},
        **more,
    )


def test_a_ratio_of_the_table_gives_its_numbers_and_others_lie_between() -> None:
    pruned = profile(3, 2)
    found = pruned_at(pruned, torch.tensor([0.0, 0.37, 0.375, 0.995, 1.0], dtype=torch.float64))
    for layer, head in itertools.product(range(3), range(2)):
        row = [float(x) for x in pruned[layer, head]]
        between = row[36] + 0.5 * (row[37] - row[36])
        expected = [0.0, row[36], between, row[98] + 0.5 * (1 - row[98]), 1.0]
        assert found[:, layer, head].tolist() == pytest.approx(expected, abs=1e-9)


def test_budgets_are_what_the_table_keeps_of_all_that_was_seen() -> None:
    """At first, and where the cache holds little of a long text: the ratio is of the text, not of what is held."""
    pruned = torch.zeros(2, 2, 99)
    pruned[..., 74] = torch.tensor([[0.5, 0.9], [0.6, 1.0]])
    pruned[..., 49] = 0.5
    assert LUKV().allocate(request(200, pruned, 200))[0].tolist() == [[100, 20], [80, 0]]
    later = LUKV().allocate(request(200, pruned, 110, seen=200))[0].tolist()
    assert later == [[100, 20], [80, 0]]
    assert LUKV().allocate(request(400, pruned, 200))[0].tolist() == [[100, 100], [100, 100]]
    with pytest.raises(ValueError, match="see `kvtailor calibrate lukv`"):
        LUKV().allocate(
            request(9, pruned, 9).__class__(
                total=torch.tensor([9]),
                capacity=torch.full((1, 2, 2), 9),
                floor=torch.zeros(1, 2, 2, dtype=torch.int64),
                layers=(0, 1),
                num_layers=2,
            )
        )


def pooled_by_hand(gains: list[float]) -> list[float]:
    """Pool adjacent violators: blocks of (sum, count), joined as long as a later one has the greater mean."""
    blocks: list[list[float]] = []
    for gain in gains:
        blocks.append([gain, 1])
        while len(blocks) > 1 and blocks[-1][0] / blocks[-1][1] > blocks[-2][0] / blocks[-2][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    return [total / count for total, count in blocks for _ in range(int(count))]


def test_gains_are_made_to_fall_and_the_split_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(2)
    gains = torch.rand(1, 3, 7, generator=generator, dtype=torch.float64) ** 3
    falling = relaxed(gains)
    for head in range(3):
        assert falling[0, head].tolist() == pytest.approx(pooled_by_hand(gains[0, head].tolist()))
    found = best_split(falling)
    sums = torch.cat([torch.zeros(3, 1, dtype=torch.float64), falling[0].cumsum(-1)], -1)
    for gone in (5, 20, 50, 81, 99):
        kept = round(21 * (1 - gone / 100))
        best = max(
            sum(float(sums[head, count]) for head, count in enumerate(counts))
            for counts in itertools.product(range(8), repeat=3)
            if sum(counts) == kept
        )
        counts = (7 * (1 - found[0, :, gone - 1])).round().long()
        assert int(counts.sum()) == kept
        assert float(sum(sums[head, counts[head]] for head in range(3))) == pytest.approx(best)


@torch.no_grad()
def test_what_a_token_is_worth_is_the_models_own_attention_to_it() -> None:
    """Against eager attention over the whole passage, with values and projections, by plain loops."""
    subject, plain = tiny(), build("llama", attention="eager")
    ids = prompts((24,))[0][0]
    job = Job(
        subject=subject, passages=(), context=24, count=1, state=0, advance=lambda what: None, draft=lambda made: ""
    )
    (found,) = _gains_of(job, [Passage(ids=ids, text="", source="")])
    full = DynamicCache(config=plain.config)
    attentions = plain(ids[None], **hand_cache(full), output_attentions=True).attentions
    order = []

    class Listening(Expected):
        def score(self, held: Held) -> torch.Tensor:
            scores = super().score(held)
            order.append(scores[0].argsort(dim=-1, descending=True, stable=True))
            return scores

    from kvtailor.plan import Plan

    kvtailor.prefill(copy.copy(subject.model), ids[None, :18], plan=Plan(score=Listening(epsilon=0.02), tokens=9))
    for number, layer in enumerate(plain.model.layers):
        for head in range(2):
            for rank, token in enumerate(order[number][head].tolist()):
                worth = 0.0
                for query_head in (2 * head, 2 * head + 1):
                    mine = layer.self_attn.o_proj.weight[:, 16 * query_head : 16 * query_head + 16]
                    length = float((mine @ full.layers[number].values[0, head, token]).norm())
                    for query in range(18, 24):
                        worth = max(worth, float(attentions[number][0, query_head, query, token]) * length)
                assert float(found[number, head, rank]) == pytest.approx(worth, rel=1e-3, abs=1e-6)


def test_a_profile_is_measured_and_splits_a_budget(tmp_path: Path) -> None:
    subject = tiny()
    made = kvtailor.calibrate(subject, "lukv", {"t": TEXT}, out=tmp_path / "l.safetensors", tokens=12 * 48, context=48)
    pruned = made.tensors["pruned"]
    assert pruned.shape == (3, 2, 99) and bool((pruned.diff(dim=-1) >= -1e-6).all()), "more goes, never less"
    torch.testing.assert_close(pruned.mean((0, 1)), torch.arange(1, 100) / 100, atol=0.01, rtol=0)
    assert "heads lose" in made.facts["verdict"] and "3 held-out passages" in made.facts["verdict"]
    lost = made.facts["held_out"]["lost"]
    assert len(lost["profile"]) == len(lost["equal"]) == 3 and lost["profile"] != lost["equal"]
    plan = f"expected(epsilon=0.02) + lukv(file='{tmp_path / 'l.safetensors'}') @ tokens=12"
    cache = kvtailor.cache_for(subject.model, plan)
    subject.model(prompts((40,))[0], **hand_cache(cache))
    held = cache.held()
    assert held.double().mean() == 12 and len(held.unique()) > 1
    with pytest.raises(KvtailorError, match="at least 384 tokens"):
        Profile().measure(
            Job(
                subject=subject,
                passages=cut(subject, {"t": TEXT}, tokens=96, context=48),
                context=48,
                count=2,
                state=0,
                advance=lambda what: None,
                draft=lambda made: "",
            )
        )
