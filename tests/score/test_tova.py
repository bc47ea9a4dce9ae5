"""TOVA against the whole attention matrix, with heads that hold different tokens, and inside a model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.held_rows import Row, held_of, make_row, row_of
from tests.support.seam.zoo import build, held_columns, prompts
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.score.tova import TOVA
from kvtailor.types import Needs


def naive(row: Row) -> Tensor:
    """(n,): the last line of each query head's n x n matrix, averaged."""
    heads, n, size = row.keys.shape
    group = row.queries.shape[0] // heads
    lines = []
    for query_head in range(heads * group):
        logits = row.queries[query_head].double() @ row.keys[query_head // group].double().T / math.sqrt(size)
        lines.append(logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)[-1])
    return torch.stack(lines).mean(0).float()


def test_equals_the_whole_matrix_for_every_padded_row() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 9, 1)]
    got = TOVA().score(held_of(rows, TOVA().needs))
    for i, row in enumerate(rows):
        expected = naive(row).expand(3, -1)
        torch.testing.assert_close(got[i, :, 63 - row.tokens :], expected, rtol=1e-5, atol=1e-6)


def two_heads() -> Row:
    """Keys are logits; probabilities 0.1 0.2 0.3 0.4 in head 0 and 0.5 0.25 0.125 0.125 in head 1."""
    keys = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 2.0, 1.0, 1.0]]).log()[..., None]
    return row_of(keys, queries=torch.ones(2, 4, 1))


def test_worked_by_hand() -> None:
    got = TOVA().score(held_of([two_heads()], Needs(window=1)))
    assert torch.equal(got[:, 0], got[:, 1])
    torch.testing.assert_close(got[0, 0], torch.tensor([0.3, 0.225, 0.2125, 0.2625]))


def test_heads_that_hold_different_tokens_meet_at_their_columns() -> None:
    # Head 0 holds the columns 0 2 9, head 1 the columns 0 5 9 and filler; 10 tokens were seen.
    held = held_of([two_heads()], Needs(window=1))
    ragged = dataclasses.replace(
        held,
        keys=torch.tensor([[[1.0, 2.0, 5.0, 1e9], [6.0, 1.0, 1.0, 1e9]]]).log()[..., None],
        positions=torch.tensor([[[0, 2, 9, -1], [0, 5, 9, -1]]]),
        valid=torch.tensor([[[True, True, True, False]] * 2]),
        seen=10,
        query_columns=torch.tensor([9]),
    )
    # By column: 0 has 1/8 and 6/8, 2 has 2/8 of head 0 alone, 5 has 1/8 of head 1 alone, 9 has 5/8 and 1/8.
    expected = torch.tensor([[7 / 16, 2 / 16, 6 / 16], [7 / 16, 1 / 16, 6 / 16]])
    torch.testing.assert_close(TOVA().score(ragged)[0, :, :3], expected)


def test_a_row_whose_newest_query_is_padding_keeps_its_newest_tokens() -> None:
    held = held_of([two_heads(), two_heads()], Needs(window=1))
    valid = held.valid.clone()
    valid[1, :, 3] = False
    got = TOVA().score(dataclasses.replace(held, valid=valid))
    torch.testing.assert_close(got[0, 0], torch.tensor([0.3, 0.225, 0.2125, 0.2625]))
    assert got.isfinite().all() and (got[1, :, :3].diff(dim=-1) > 0).all()


def test_padding_before_such_a_row_makes_its_tokens_no_older() -> None:
    short = row_of(two_heads().keys[:, :3], queries=torch.ones(2, 3, 1))
    held = held_of([two_heads(), short], Needs(window=1))
    valid = held.valid.clone()
    valid[1, :, 3] = False
    # Its first token stands in column 1 of 4.
    got = TOVA().score(dataclasses.replace(held, valid=valid))[1, :, 1:3]
    torch.testing.assert_close(got, torch.tensor([[0.0, 1 / 3]] * 2))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@torch.no_grad()
def test_keeps_what_the_models_own_attention_says(family: str) -> None:
    ids, mask = prompts((56, 43))
    model = build(family)
    cache = kvtailor.cache_for(model, "tova @ tokens=20")
    model(ids, attention_mask=mask, **hand_cache(cache))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain = build(family, attention="eager")(ids, attention_mask=mask, position_ids=positions, output_attentions=True)
    for layer, held in held_columns(cache).items():
        weights = plain.attentions[layer][:, :, -1].mean(1)
        weights[:, -1] = torch.inf
        best = torch.zeros_like(held[:, 0]).scatter(1, weights.topk(20).indices, True)
        assert torch.equal(held, best[:, None].expand_as(held))


def test_torch_counts_the_same_logits() -> None:
    heads, group, n, size = 3, 2, 63, 7
    row = make_row(n, heads=heads, group=group, size=size, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        TOVA().score(held_of([row], TOVA().needs))
    rest = heads * n * group * 5
    assert counter.get_total_flops() + rest == heads * TOVA().flops(tokens=n, group=group, size=size)


def test_says_what_it_needs() -> None:
    assert TOVA().needs == Needs(window=1) and TOVA().recent == 1 and TOVA().slack == 32
    with pytest.raises(ValueError, match=r"^tova scores by the newest query, but none was gathered"):
        TOVA().score(held_of([two_heads()], Needs()))
