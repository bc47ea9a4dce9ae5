"""LazyEviction against a loop over queries one by one, through several evictions, and inside of a model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.held_rows import held_of, make_row
from tests.support.seam.zoo import build, held_columns, prompts
from torch import Tensor

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.score.critical import Critical
from kvtailor.score.decoding.lazyeviction import LazyEviction
from kvtailor.types import Held


class Naive:
    """One kv head: the last active step and the longest interval of each token, from the first watched query on."""

    def __init__(self, start: int, threshold: float) -> None:
        self.start, self.threshold = start, threshold
        self.known: dict[int, tuple[int, int]] = {}

    def watch(self, queries: Tensor, column: int, keys: Tensor, columns: list[int], scaling: float) -> None:
        """One step of a group's queries (g, d) over the keys (n, d) that the head holds."""
        seen = [i for i, each in enumerate(columns) if each <= column]
        given = ((queries.double() @ keys[seen].double().T) * scaling).softmax(-1).amax(0)
        for i, share in zip(seen, given.tolist(), strict=True):
            token = columns[i]
            last, longest = self.known.get(token, (max(token, self.start) - 1, 0))
            if share >= self.threshold:
                last, longest = column, max(longest, column - last)
            self.known[token] = last, longest

    def score(self, token: int, newest: int) -> float:
        last, longest = self.known.get(token, (max(token, self.start) - 1, 0))
        rests = (newest - last) / max(longest, 1e-5)
        again = 2 / (1 + math.exp(min(rests, 700)))
        return again + (2 / (1 + math.exp(longest - 1)) if longest else 0.0)


def at(held: Held, seen: int, columns: Tensor, window: int, previous: Tensor | None) -> Held:
    """What is left of a layer (h, n) after so many tokens, where it holds these columns (h, k) in each head."""
    pick = columns[None].expand(1, -1, -1)
    return dataclasses.replace(
        held,
        keys=held.keys.gather(2, pick[..., None].expand(*pick.shape, held.keys.shape[-1])),
        values=held.values.gather(2, pick[..., None].expand(*pick.shape, held.values.shape[-1])),
        positions=pick.clone(),
        valid=torch.ones_like(pick, dtype=torch.bool),
        seen=seen,
        queries=held.queries[:, :, seen - window : seen],
        query_columns=torch.arange(seen - window, seen),
        previous=previous,
        noted=None,
    )


def test_equals_a_loop_over_queries_through_three_evictions() -> None:
    window, heads, group = 9, 2, 2
    scorer = LazyEviction(window=window, threshold=0.05)
    row = make_row(80, heads=heads, group=group, size=5, generator=torch.Generator().manual_seed(2))
    whole = held_of([row], dataclasses.replace(scorer.needs, window=80, previous=False, notes=0))
    naives = [Naive(31 - window, scorer.threshold) for _ in range(heads)]
    columns, previous, seen = torch.arange(31).expand(heads, -1), None, 31
    watched = range(31 - window, 31)
    for steps in (9, 7, 9, 0):
        held = at(whole, seen, columns, window, previous)
        for head, naive in enumerate(naives):
            for column in watched:
                queries = whole.queries[0, head * group : (head + 1) * group, column]
                naive.watch(queries, column, held.keys[0, head], columns[head].tolist(), held.scaling)
        noted = scorer.note(held)
        scores = scorer.score(dataclasses.replace(held, noted=noted))[0]
        for head, naive in enumerate(naives):
            expected = [naive.score(token, seen - 1) for token in columns[head].tolist()]
            torch.testing.assert_close(scores[head], torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert len(scores.unique()) > 9
        # Each head keeps others, the newest window among them; what it noted of them goes along.
        best = scores.index_fill(1, torch.arange(scores.shape[1] - window, scores.shape[1]), 9.0)
        kept = best.topk(25).indices.sort().values
        columns, noted = columns.gather(1, kept), noted[0].gather(2, kept[:, None].expand(-1, 2, -1))
        columns = torch.cat([columns, torch.arange(seen, seen + steps).expand(heads, -1)], 1)
        previous = torch.cat([noted, torch.full((heads, 2, steps), torch.nan)], 2)[None]
        watched, seen = range(seen, seen + steps), seen + steps


def test_by_hand() -> None:
    """Noted are the last active place and the longest interval; the newest token is at place 20."""
    held = held_of([make_row(21, heads=1, group=1, size=4, generator=torch.Generator())], LazyEviction().needs)
    noted = torch.zeros(1, 1, 2, 21)
    noted[0, 0, :, 0] = torch.tensor([20.0, 1.0])  # looked at each step
    noted[0, 0, :, 1] = torch.tensor([14.0, 6.0])  # comes back after 6 at most, and rests for 6
    noted[0, 0, :, 2] = torch.tensor([2.0, 6.0])  # rests for 18
    noted[0, 0, :, 3] = torch.tensor([3.0, 0.0])  # was never looked at
    scores = LazyEviction().score(dataclasses.replace(held, noted=noted))[0, 0]
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = [1 + 1, 2 * sigmoid(-1) + 2 * sigmoid(-5), 2 * sigmoid(-3) + 2 * sigmoid(-5), 0.0]
    torch.testing.assert_close(scores[:4], torch.tensor(expected))


@torch.no_grad()
def test_in_a_model_notes_go_with_the_tokens_that_stay_and_come_back_from_a_file(tmp_path, monkeypatch) -> None:
    made: dict[int, tuple[Held, Tensor]] = {}
    note = LazyEviction.note

    def noting(self: LazyEviction, held: Held) -> Tensor:
        made[held.layer] = held, note(self, held)
        return made[held.layer][1]

    monkeypatch.setattr(LazyEviction, "note", noting)
    model = build("llama")
    plan = "lazyeviction(window=4, threshold=0.02) @ tokens=12"
    cache = kvtailor.cache_for(model, plan)
    ids, mask = prompts((40, 23))
    model(ids, attention_mask=mask, **hand_cache(cache))
    evictions = 0
    for step in range(14):
        for state, held in zip(cache.engine.states, held_columns(cache).values(), strict=True):
            if state.clock.growth:
                continue
            evictions += 1
            columns = state.observed.scored_columns
            assert state.observed.scored.shape == (2, 2, 2, columns.shape[-1])
            for row in range(2):
                for head in range(2):
                    here = held[row, head].nonzero()[:, 0]
                    assert torch.equal(columns[row, head, : here.numel()].long(), here)
                    held_then, noted = made[state.index]
                    slots = torch.where(held_then.valid[row, head], held_then.positions[row, head], -1)
                    at = torch.stack([(slots == column).nonzero()[0, 0] for column in here])
                    found = state.observed.scored[row, head, :, : here.numel()]
                    assert torch.equal(found, noted[row, head][:, at]) and found[1].max() > 0
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        model(torch.full((2, 1), 7 + step), attention_mask=mask, **hand_cache(cache))
    assert evictions >= 3 * len(cache.engine.states)
    cache.save(tmp_path / "one.safetensors")
    other = kvtailor.load_cache(model, tmp_path / "one.safetensors")
    for one, two in zip(cache.engine.states, other.engine.states, strict=True):
        assert torch.equal(one.observed.scored, two.observed.scored) and one.clock == two.clock


def test_it_needs_two_numbers_and_inside_of_critical_none() -> None:
    assert LazyEviction().needs.notes == 2 and LazyEviction(window=9).slack == 9
    assert Critical(of=LazyEviction()).needs.notes == 0
    assert Plan.parse("lazyeviction(window=9) @ tokens=64").slack_tokens == 9
    with pytest.raises(ValueError, match="window must be at least 1"):
        LazyEviction(window=0)
    with pytest.raises(ValueError, match="threshold must be above 0"):
        LazyEviction(threshold=0.0)
    with pytest.raises(ValueError, match="none were gathered"):
        held = held_of([make_row(9, heads=1, group=1, size=4, generator=torch.Generator())], LazyEviction().needs)
        LazyEviction().score(dataclasses.replace(held, queries=None))
