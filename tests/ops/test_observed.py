"""Attention of observed queries against the whole matrix of each row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import Row, held_of, make_row, with_holes
from torch import Tensor

from kvtailor.ops.attention.definition import reference
from kvtailor.ops.attention.observed import lane_attention, mean_attention, window_attention, window_means
from kvtailor.score.snapkv import SnapKV
from kvtailor.score.tova import TOVA
from kvtailor.types import Held, Needs

LENGTHS = (63, 40, 5)


def rows_of(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [make_row(n, heads=3, group=2, size=7, generator=generator) for n in lengths]


def whole(row: Row) -> Tensor:
    """(h, g, n, n) float64 causal attention of one row."""
    n = row.tokens
    values = torch.zeros(*row.keys.shape[:2], 1, dtype=torch.float64)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    queries, keys = row.queries.double()[None], row.keys.double()[None]
    return reference(queries, keys, values[None], mask, 7**-0.5)[2][0]


def drop(held: Held, head: int, column: int) -> Held:
    """The same where one head of all rows holds one token less."""
    valid = held.valid.clone()
    valid[:, head, column] = False
    return replace(held, valid=valid)


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    given = lane_attention(torch.ones(2, 3, 4), torch.tensor([0, 4, 9]), torch.ones(2, 4), torch.tensor([3, 7]), 1.0)
    assert given.tolist() == [[[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]]] * 2


@pytest.mark.parametrize("holes", [0, 11])
@pytest.mark.parametrize("window", [1, 8, 32, 100])
def test_the_window_is_the_last_rows_of_the_matrix(window: int, holes: int) -> None:
    rows = rows_of(window)
    held = held_of(rows, Needs(window=window))
    held = with_holes(held, holes, torch.Generator().manual_seed(1))[0] if holes else held
    for i, row in enumerate(rows):
        voters, older = min(window, row.tokens), row.tokens - min(window, row.tokens)
        for head in range(3):
            given, history = window_attention(held, i, head)
            torch.testing.assert_close(given.double(), whole(row)[head, :, -voters:], rtol=1e-5, atol=1e-7)
            assert int(history.sum()) == older and not history[older:].any()


def test_a_query_whose_token_no_head_holds_takes_no_part() -> None:
    held = held_of(rows_of(3), Needs(window=4))
    for head in range(2):
        held = drop(held, head, 61)
    assert window_attention(held, 0, 0)[0].shape == (2, 4, 62), "one head still holds it"
    held = drop(held, 2, 61)
    assert window_attention(held, 0, 0)[0].shape == (2, 3, 62)


def test_means_are_over_queries_and_group_and_one_where_nobody_asks() -> None:
    rows = rows_of(5)
    held = held_of(rows, Needs(window=6))
    found = window_means(held, lambda given: given.amax(-1))
    for i, row in enumerate(rows):
        torch.testing.assert_close(found[i].double(), whole(row)[:, :, -6:].amax(-1).mean((1, 2)), rtol=1e-5, atol=0)
    gone = replace(held, valid=held.valid & (held.positions < 57))
    assert window_means(gone, lambda given: given.amax(-1)).tolist() == [[1.0] * 3] * 3


@pytest.mark.parametrize("window", [100, 63, 20, 1])
def test_the_mean_is_over_all_query_heads(window: int) -> None:
    rows = rows_of(window)
    held = held_of(rows, Needs(window=window))
    for i, row in enumerate(rows):
        expected = whole(row).mean((0, 1))[-window:]
        torch.testing.assert_close(mean_attention(held, i).double(), expected, rtol=1e-5, atol=1e-7)


def test_heads_that_hold_other_tokens_meet_at_their_columns() -> None:
    rows = rows_of(9, (12,))
    held = drop(drop(held_of(rows, Needs(window=99)), 0, 0), 1, 5)
    expected = torch.zeros(12, 12, dtype=torch.float64)
    for head, gone in ((0, 0), (1, 5), (2, None)):
        logits = rows[0].queries.double()[2 * head : 2 * head + 2] @ rows[0].keys[head].double().T * 7**-0.5
        seen = torch.ones(12, 12, dtype=torch.bool).tril()
        if gone is not None:
            seen[:, gone] = False
        share = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        expected += share.sum(0) / 6
    torch.testing.assert_close(mean_attention(held, 0).double(), expected, rtol=1e-5, atol=1e-7)


def test_only_queries_whose_token_is_held_have_rows() -> None:
    held = held_of(rows_of(9, (12,)), Needs(window=99))
    later = replace(held, valid=held.valid & (held.positions >= 4))
    assert mean_attention(later, 0).shape == (8, 8)


@pytest.mark.parametrize(("window", "rows"), [(3, 5), (8, 16), (0, 3), (8, 0), (100, 100)])
def test_one_method_sees_what_it_declared_whatever_others_declare(window: int, rows: int) -> None:
    """`Held.within` of much is what little evidence would have gathered."""
    made = rows_of(2)
    needs = Needs(window=window, rows=rows)
    found = held_of(made, needs | Needs(window=32, rows=64)).within(needs)
    expected = held_of(made, needs)
    for name in ("queries", "query_columns", "sampled", "sampled_columns"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert torch.equal(one, other), name


def test_a_token_that_stands_for_three_is_looked_at_as_often_as_three_equal_ones() -> None:
    """For all that looks at a window: the tokens 10, 11 and 12 are one key, said three times or once with a weight."""
    row = rows_of(4, (40,))[0]
    keys = row.keys.clone()
    keys[:, 11:13] = keys[:, 10:11]
    needs = Needs(window=6)
    thrice = held_of([replace(row, keys=keys)], needs)
    single = torch.ones(40, dtype=torch.bool)
    single[11:13] = False
    once = replace(
        thrice,
        keys=thrice.keys[:, :, single],
        values=thrice.values[:, :, single],
        positions=thrice.positions[:, :, single],
        valid=thrice.valid[:, :, single],
        log_weight=torch.where(torch.arange(40) == 10, 3.0, 1.0).log()[single].expand(1, 3, -1),
    )

    def joined(of_three: Tensor) -> Tensor:
        whole = of_three.clone()
        whole[..., 10] = of_three[..., 10:13].sum(-1)
        return whole[..., single]

    for head in range(3):
        given = window_attention(once, 0, head)[0]
        assert torch.allclose(given, joined(window_attention(thrice, 0, head)[0]), atol=1e-6)
    assert torch.allclose(mean_attention(once, 0), joined(mean_attention(thrice, 0)), atol=1e-6)
    for scorer in (SnapKV(window=6, kernel=1), TOVA()):
        scores = [scorer.score(each.within(scorer.needs)) for each in (once, thrice)]
        assert torch.allclose(scores[0], joined(scores[1]), atol=1e-5)
