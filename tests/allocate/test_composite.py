"""KVCompose: composite tokens by a plain loop, and the score that goes with them."""

from __future__ import annotations

import pytest
import torch
from tests.support.budget_requests import asked
from tests.support.held_rows import held_of, make_row
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.allocate.composite import Composite
from kvtailor.score.by_repetition.kvcompose import KVCompose


def by_hand(scores: torch.Tensor, kept: int) -> list[int]:
    """Tokens of each layer: scores (l, h, n), so many composite tokens of all; layer 0 has the most of each rank."""
    layers, heads, n = scores.shape
    ranked = [[sorted(scores[layer, head].tolist(), reverse=True) for head in range(heads)] for layer in range(layers)]
    worth = [
        [sum(ranked[layer][head][i] for head in range(heads)) / heads for i in range(n)] for layer in range(layers)
    ]
    worth[0] = [max(worth[layer][i] for layer in range(layers)) for i in range(n)]
    best = sorted((-worth[layer][i], layer) for layer in range(layers) for i in range(n))[:kept]
    return [sum(layer == each for _, layer in best) for each in range(layers)]


@pytest.mark.parametrize("kept", [5, 40, 63, 120])
def test_equals_a_plain_loop(kept: int) -> None:
    scores = (
        torch.rand(3, 2, 63, generator=torch.Generator().manual_seed(kept)) ** torch.tensor([4.0, 9, 1])[:, None, None]
    )
    found = Composite(sure=0).allocate(asked(2 * kept, [63] * 3, heads=2, scores=[each[None] for each in scores]))[0]
    assert found[:, 0].tolist() == found[:, 1].tolist() == by_hand(scores, kept)
    assert len(set(by_hand(scores, kept))) > 1


def test_a_layer_is_sure_of_something_and_heads_may_hold_unequal_numbers() -> None:
    scores = [torch.rand(1, 2, 20) + 1, torch.rand(1, 2, 20)]
    assert Composite().allocate(asked(20, [20] * 2, heads=2, scores=scores))[0].tolist() == [[9, 9], [1, 1]]
    assert Composite(sure=4).allocate(asked(20, [20] * 2, heads=2, scores=scores))[0].tolist() == [[6, 6], [4, 4]]
    scores[0][0, 1, 6:] = -torch.inf
    uneven = Composite().allocate(asked(20, torch.tensor([[20, 6], [20, 20]]), heads=2, scores=scores))[0]
    assert int(uneven.sum()) == 20 and int(uneven[0, 1]) <= 6
    with pytest.raises(ValueError, match="composite: sure must be 0 or more tokens, found -1"):
        Composite(sure=-1)


def test_the_score_adds_what_the_heads_have_in_common() -> None:
    """Three rows with padding; what came after the context outranks it, and a head that lacks a token adds nothing."""
    generator = torch.Generator().manual_seed(5)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 5)]
    held = held_of(rows, KVCompose().needs)
    found = torch.rand(3, 3, 63, generator=generator)
    found[..., 60:] = -1.0
    held.valid[0, 1, 7] = False
    object.__setattr__(held, "reconstruction", found)
    scores = KVCompose(sinks=1).score(held)
    for row, pad in enumerate((0, 23, 58)):
        for token in range(pad + 1, 60):
            there = [float(found[row, head, token]) * bool(held.valid[row, head, token]) for head in range(3)]
            for head in range(3):
                if held.valid[row, head, token]:
                    expected = (there[head] + sum(there) / 3) / 2
                    assert float(scores[row, head, token]) == pytest.approx(expected, abs=1e-6)
        assert bool((scores[row, :, 60:] >= 2).all()) and bool((scores[row, :, pad] > scores[row, :, 62]).all())


@torch.no_grad()
def test_what_is_found_is_the_mean_of_each_query_heads_highest() -> None:
    """One piece and no instruction: the model's own attention when it is fed the same tokens again."""
    model, plain, ids = build("llama"), build("llama", attention="eager"), prompts((37,))[0]
    cache = kvtailor.prefill(model, ids, plan="kvcompose @ keep=0.5, slack=64")
    attentions = plain(torch.cat([ids, ids], 1), output_attentions=True).attentions
    for state, given in zip(cache.engine.states, attentions, strict=True):
        for head in range(2):
            for token in range(37):
                highest = [max(given[0, q, 37 + i, token].item() for i in range(37)) for q in (2 * head, 2 * head + 1)]
                found = float(state.observed.reconstruction[0, head, token])
                assert found == pytest.approx(sum(highest) / 2, rel=1e-4, abs=1e-7)


def test_in_a_model_heads_of_a_layer_hold_equally_many() -> None:
    ids, mask = prompts((60, 41, 12))
    cache = kvtailor.prefill(build("llama"), ids, mask, plan="kvcompose(chunk=17) + composite @ keep=0.4")
    counts = torch.stack([columns.sum(-1) for columns in held_columns(cache).values()], 1)
    assert bool((counts == counts[..., :1]).all()) and len(counts[0, :, 0].unique()) > 1
    for row, length in enumerate((60, 41, 12)):
        assert abs(int(counts[row].sum()) - 0.4 * length * counts[row].numel()) < counts.shape[-1]


@pytest.mark.parametrize("name", ["chunk", "lead", "sinks"])
def test_refuses_what_makes_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match=f"kvcompose: {name} must be"):
        KVCompose(**{name: -1})
