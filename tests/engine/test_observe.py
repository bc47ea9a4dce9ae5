"""Evidence gathered in pieces is the evidence gathered at once, and mass is what eager attention says it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.engine.observe import observe
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Held, Needs, Rotation
from kvtailor.types.evidence import Evidence, strided


@pytest.mark.parametrize("pieces", [(63,), (16, 16, 16, 15), (40, 1, 1, 21), (1,) * 63])
@pytest.mark.parametrize("window", [1, 8, 20])
def test_a_window_in_pieces(pieces: tuple[int, ...], window: int) -> None:
    query = torch.randn(3, 5, 63, 8)
    evidence, first = Evidence(), 0
    for piece in query.split(pieces, 2):
        evidence = observe(Needs(window=window), evidence, piece, first, None)
        first += piece.shape[2]
    assert torch.equal(evidence.queries, query[:, :, -window:])
    assert evidence.columns.tolist() == list(range(63 - window, 63))
    assert evidence.queries.untyped_storage().nbytes() == evidence.queries.numel() * 4, "a view would keep all queries"


@pytest.mark.parametrize("known", [False, True])
def test_a_window_over_a_gap_of_columns(known: bool) -> None:
    """Of what does not join, or is not known to, each query keeps its column; the host knows of no span then."""
    query = torch.randn(1, 2, 9, 4)
    evidence = observe(Needs(window=6), Evidence(), query[:, :, :5], 10, None)
    evidence = evidence if known else replace(evidence, span=None)
    evidence = observe(Needs(window=6), evidence, query[:, :, 5:8], 20 if known else 15, None)
    assert evidence.columns.tolist() == ([12, 13, 14, 20, 21, 22] if known else [12, 13, 14, 15, 16, 17])
    assert evidence.span is None and torch.equal(evidence.queries, query[:, :, 2:8])


def test_the_old_evidence_is_left_alone() -> None:
    old = observe(Needs(mass=True), Evidence(), torch.zeros(1, 1, 2, 4), 0, [torch.ones(1, 2)])
    new = observe(Needs(mass=True), old, torch.zeros(1, 1, 1, 4), 2, [torch.full((1, 3), 2.0)])
    assert old.mass[0].tolist() == [[1.0, 1.0]]
    assert new.mass[0].tolist() == [[3.0, 3.0, 2.0]]


def test_mass_that_nobody_gave_is_an_error() -> None:
    with pytest.raises(ValueError, match="mass"):
        observe(Needs(mass=True), Evidence(), torch.zeros(1, 1, 1, 4), 0, None)


@pytest.mark.parametrize("chunk", [60, 16, 1])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@torch.no_grad()
def test_mass_is_the_column_sum_of_eager_attention(family: str, chunk: int) -> None:
    """Prompt in chunks, then decoded tokens; a padded row; summed over the group's query heads."""
    model, eager = build(family), build(family, attention="eager")
    ids, mask = prompts((60, 47))
    cache = kvtailor.cache_for(model, "h2o(recent=4) @ tokens=500")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    pieces = [*ids[:, :52].split(chunk, 1), *ids[:, 52:].split(1, 1)]
    seen = 0
    for piece in pieces:
        end = seen + piece.shape[1]
        model(piece, attention_mask=mask[:, :end], position_ids=positions[:, seen:end], **hand_cache(cache))
        seen = end
    attentions = eager(ids, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    for state, attention in zip(cache.engine.states, attentions, strict=True):
        real = attention * mask[:, None, :, None]
        expected = real.unflatten(1, (state.heads, -1)).sum((2, 3))
        found = torch.cat([part.view(2, state.heads, -1) for part in state.observed.evidence.mass], -1)
        columns = mask[:, None].expand_as(expected).bool()
        assert torch.allclose(found[columns], expected[columns], atol=1e-4)


@torch.no_grad()
def test_tokens_that_are_encoded_keep_their_mass() -> None:
    """The prompt's own attention is exact, so its mass is, too."""
    model, eager = build("llama"), build("llama", attention="eager")
    ids, _ = prompts((60, 60))
    cache = kvtailor.cache_for(model, "h2o(recent=4) + kivi(bits=8, group=4, recent=8) @ tokens=500")
    model(ids, **hand_cache(cache))
    attentions = eager(ids, output_attentions=True).attentions
    for state, attention in zip(cache.engine.states, attentions, strict=True):
        assert state.stored.segments and state.stored.segments[0].layout.size >= 40
        found = torch.cat([part.view(2, state.heads, -1) for part in state.observed.evidence.mass], -1)
        assert torch.allclose(found, attention.unflatten(1, (state.heads, -1)).sum((2, 3)), atol=1e-4)


def naive_sample(query: torch.Tensor, columns: list[int], most: int) -> list[int]:
    """Columns of a row's real queries, thinned by halving until at most `most` are left."""
    ages = list(range(len(columns)))
    stride = 1
    while len([age for age in ages if age % stride == 0]) > most:
        stride *= 2
    return [column for age, column in zip(ages, columns, strict=True) if age % stride == 0]


@pytest.mark.parametrize("pieces", [(63,), (16, 16, 16, 15), (40, 1, 1, 21), (1,) * 63])
@pytest.mark.parametrize("most", [1, 7, 16, 100])
def test_a_sample_in_pieces_with_padding(pieces: tuple[int, ...], most: int) -> None:
    query, pads = torch.randn(3, 5, 63, 8), (0, 13, 60)
    real = torch.arange(63) >= torch.tensor(pads)[:, None]
    evidence, first = Evidence(), 0
    for piece in query.split(pieces, 2):
        first += piece.shape[2]
        evidence = observe(Needs(rows=most), evidence, piece, first - piece.shape[2], None, real=real[:, :first])
    for row, pad in enumerate(pads):
        expected = naive_sample(query[row], list(range(pad, 63)), most)
        found = evidence.sampled_columns[row]
        assert found[found >= 0].tolist() == expected
        assert torch.equal(evidence.sampled[row][:, found >= 0], query[row][:, expected])
    assert evidence.sampled.shape[2] == most


@pytest.mark.parametrize("pieces", [(63,), (16, 16, 16, 15), (40, *(1,) * 23)])
@pytest.mark.parametrize("most", [1, 7, 16, 100])
def test_a_sample_in_pieces_without_padding(pieces: tuple[int, ...], most: int) -> None:
    query, evidence, first = torch.randn(2, 3, 63, 8), Evidence(), 0
    for piece in query.split(pieces, 2):
        before, held = evidence, None if evidence.sampled is None else evidence.sampled.clone()
        evidence = observe(Needs(rows=most), evidence, piece, first, None)
        assert before.sampled is None or torch.equal(before.sampled, held)
        first += piece.shape[2]
    expected = naive_sample(query[0], list(range(63)), most)
    found = evidence.sampled_columns[0]
    assert found[found >= 0].tolist() == expected and torch.equal(found, evidence.sampled_columns[1])
    assert torch.equal(evidence.sampled[:, :, : len(expected)], query[:, :, expected])
    assert not evidence.sampled[:, :, len(expected) :].any()


@pytest.mark.parametrize("fewer", [1, 3, 8, 40])
def test_fewer_of_a_sample_are_what_fewer_would_have_been_sampled(fewer: int) -> None:
    query, pads = torch.randn(3, 2, 63, 8), (0, 30, 62)
    real = torch.arange(63) >= torch.tensor(pads)[:, None]
    whole, less = (observe(Needs(rows=most), Evidence(), query, 0, None, real=real) for most in (16, fewer))
    found, columns = strided(whole.sampled, whole.sampled_columns, fewer)
    for row, pad in enumerate(pads):
        expected = naive_sample(query[row], list(range(pad, 63)), min(fewer, 16))
        there = columns[row] >= 0
        assert columns[row][there].tolist() == expected
        assert torch.equal(found[row][:, there], query[row][:, expected]) and not found[row][:, ~there].any()
    if fewer <= 16:
        assert torch.equal(columns, less.sampled_columns) and torch.equal(found, less.sampled)


@pytest.mark.parametrize("pieces", [(600,), (300, 300), (599, 1), (7,) * 85 + (5,)])
def test_moments_in_pieces_are_those_of_all_real_queries(pieces: tuple[int, ...]) -> None:
    rotation = Rotation(frequencies=torch.tensor([1.0, 0.2]), interleaved=True)
    before = torch.randn(2, 3, 600, 6, dtype=torch.float64) + 2
    query = turn(before, torch.arange(600), rotation).float()
    real = torch.arange(600) >= torch.tensor([0, 250])[:, None]
    evidence, first = Evidence(), 0
    for piece in query.split(pieces, 2):
        first += piece.shape[2]
        needs = Needs(moments=True, moments_skip=4)
        start = first - piece.shape[2]
        evidence = observe(needs, evidence, piece, start, None, real=real[:, :first], rotation=rotation)
    for row, start in enumerate((4, 254)):
        kept = before[row, :, start:]
        assert torch.allclose(evidence.moments.mean[row].double(), kept.mean(1), atol=1e-4)
        expected = torch.stack([torch.cov(head.T, correction=0) for head in kept])
        assert torch.allclose(evidence.moments.covariance()[row].double(), expected, atol=1e-3)


def test_moments_without_a_rotation_are_an_error() -> None:
    with pytest.raises(ValueError, match="rotation"):
        observe(Needs(moments=True), Evidence(), torch.zeros(1, 1, 1, 4), 0, None)


def test_scores_are_found_again_by_column() -> None:
    held = Held(
        keys=torch.zeros(1, 2, 4, 1),
        values=torch.zeros(1, 2, 4, 1),
        seen=9,
        layer=0,
        layers=1,
        scaling=1.0,
        positions=torch.tensor([[[0, 3, 5, 8], [1, 2, 8, 8]]]),
        first=torch.zeros(1),
        valid=torch.tensor([[[True] * 4, [True, True, True, False]]]),
    )
    columns = torch.tensor([[[0, 2, 5, 6], [2, 4, 5, 8]]], dtype=torch.int32)
    found = held.looked_back(columns, torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]]))
    nan = float("nan")
    expected = torch.tensor([[[1.0, nan, 3, nan], [nan, 5, 8, nan]]])
    assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("score", ["noncausal(chunk=8)", "expected", "snapkv(window=4)"])
@torch.no_grad()
def test_a_codec_that_wants_queries_lets_decoded_tokens_leave_no_more_than_these(score: str) -> None:
    """Without slack nothing is evicted while it decodes, so what the score gathers of a prompt stays as it is."""
    model = build("llama")
    cache = kvtailor.cache_for(model, f"{score} + channels @ tokens=24")
    fed(model, cache, prompts((40,))[0], None, keep=1)
    before = [state.observed.evidence for state in cache.engine.states]
    for token in (5, 6, 7):
        fed(model, cache, torch.tensor([[token]]), None, keep=1)
    assert cache.engine.has_fast_path
    for state, was in zip(cache.engine.states, before, strict=True):
        now = state.observed.evidence
        assert now.sampled is was.sampled and now.moments_count is was.moments_count
        assert now.columns is not None and int(now.columns[-1]) == 42
