"""Non-causal attention against loops over queries and keys, and chunks worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row, row_of, with_holes
from torch import Tensor

from kvtailor.score.leverage.noncausal import NonCausal


def naive(queries: Tensor, asked: list[int], keys: Tensor, values: Tensor, chunk: int, factor: float) -> list[float]:
    """One kv head by loops: queries (g, n, d), of which those of the tokens `asked` take part."""
    n, mass = keys.shape[0], [1.0] * keys.shape[0]
    for first in range(0, n, chunk):
        inside = range(first, min(first + chunk, n))
        asking = [i for i in inside if i in asked]
        if not asking:
            continue
        for j in inside:
            mass[j] = 0.0
        for group in queries.double():
            for i in asking:
                weight = [math.exp(factor * float(group[i] @ keys[j].double())) for j in inside]
                for j, w in zip(inside, weight, strict=True):
                    mass[j] += w / sum(weight) / len(queries) * len(inside) / len(asking)
    weighed = [0.0, *(m * float(v.double().norm()) for m, v in zip(mass, values, strict=True)), 0.0]
    return [sum(weighed[j : j + 3]) / 3 for j in range(n)]


@pytest.mark.parametrize(
    ("chunk", "rows", "scaled"), [(8, 1024, False), (8, 20, True), (64, 1024, True), (5, 3, False)]
)
def test_equals_loops_in_every_padded_row(chunk: int, rows: int, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    lengths = (63, 40, 5, 1)
    made = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in lengths]
    scorer = NonCausal(chunk=chunk, rows=rows, scaled=scaled)
    held = held_of(made, scorer.needs)
    scores = scorer.score(held)
    for i, row in enumerate(made):
        stride = next(2**k for k in range(9) if -(-row.tokens // 2**k) <= rows)
        asked = list(range(0, row.tokens, stride))
        for head in range(3):
            queries = row.queries[2 * head : 2 * head + 2]
            factor = held.scaling if scaled else 1.0
            expected = naive(queries, asked, row.keys[head], row.values[head], chunk, factor)
            found = scores[i, head, 63 - row.tokens :]
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_later_chunks_are_cut_from_what_is_held_and_asked_by_its_queries() -> None:
    """Of a text of 40 tokens 25 are held: the score is that of a text of these 25."""
    generator = torch.Generator().manual_seed(8)
    row = make_row(40, heads=2, group=2, size=6, generator=generator)
    scorer = NonCausal(chunk=4)
    held = held_of([row], scorer.needs)
    left = torch.rand(40, generator=generator).argsort()[:25].sort().values
    there = torch.zeros(40, dtype=torch.bool).index_fill(0, left, True)
    holed, where = with_holes(replace(held, valid=held.valid & there), 9, generator)
    scores = scorer.score(holed).gather(2, where)[0][:, left]
    for head in range(2):
        queries = row.queries[2 * head : 2 * head + 2, left]
        expected = naive(queries, list(range(25)), row.keys[head, left], row.values[head, left], 4, 1.0)
        torch.testing.assert_close(scores[head], torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_a_token_that_stands_for_several_gets_as_much_as_they() -> None:
    """A merged token of weight 2 beside two equal tokens, one of which nothing asks."""
    generator = torch.Generator().manual_seed(9)
    row = make_row(6, heads=1, group=1, size=4, generator=generator)
    keys, values = row.keys.clone(), row.values.clone()
    keys[0, 5], values[0, 5] = keys[0, 4], values[0, 4]
    scorer = NonCausal(chunk=8)
    both = held_of([row_of(keys, values, row.queries)], scorer.needs)
    assert both.sampled_columns is not None
    both = replace(both, sampled_columns=both.sampled_columns.masked_fill(both.sampled_columns == 5, -1))
    one = replace(both, valid=both.valid & (both.positions < 5))
    weight = torch.zeros(1, 1, 6).masked_fill(torch.arange(6) == 4, math.log(2))
    many, merged = scorer.score(both)[0, 0] / 6, scorer.score(replace(one, log_weight=weight))[0, 0] / 5
    torch.testing.assert_close(many[:3], merged[:3])


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"^noncausal: chunk must be at least 1 token, found 0"):
        NonCausal(chunk=0)
    with pytest.raises(ValueError, match=r"^noncausal: rows must be at least 1 query, found 0"):
        NonCausal(rows=0)
