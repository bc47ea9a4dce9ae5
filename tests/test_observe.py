"""Evidence gathered in pieces is the evidence gathered at once, and mass is what eager attention says it is."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.observe import Evidence, observe
from kvtailor.types import Needs
from tests.seam.zoo import build, prompts


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
        model(piece, attention_mask=mask[:, :end], position_ids=positions[:, seen:end], past_key_values=cache)
        seen = end
    attentions = eager(ids, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    for state, attention in zip(cache.route.states, attentions, strict=True):
        real = attention * mask[:, None, :, None]
        expected = real.unflatten(1, (state.heads, -1)).sum((2, 3))
        found = torch.cat([part.view(2, state.heads, -1) for part in state.evidence.mass], -1)
        columns = mask[:, None].expand_as(expected).bool()
        assert torch.allclose(found[columns], expected[columns], atol=1e-4)
