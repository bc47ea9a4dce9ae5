"""SnapKV against the whole attention matrix and loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.held_rows import Row, held_of, make_row
from torch import Tensor

from kvtailor.score.snapkv import SnapKV
from kvtailor.types import Held, Needs


def naive(row: Row, scorer: SnapKV) -> Tensor:
    """(h, n): all n x n probabilities of one row, then votes, group and pooling by loops."""
    heads, n, size = row.keys.shape
    group = row.queries.shape[0] // heads
    window = min(scorer.window, n)
    out = torch.zeros(heads, n)
    for head in range(heads):
        of_group = []
        for query_head in range(head * group, (head + 1) * group):
            logits = row.queries[query_head].double() @ row.keys[head].double().T / math.sqrt(size)
            logits[torch.ones(n, n).triu(1).bool()] = -torch.inf
            of_group.append(logits.softmax(-1)[n - window :, : n - window].sum(0))
        stacked = torch.stack(of_group)
        votes = {"mean": stacked.mean(0), "sum": stacked.sum(0), "max": stacked.amax(0)}[scorer.reduce].tolist()
        for j in range(n - window):
            near = votes[max(0, j - scorer.kernel // 2) : j + scorer.kernel // 2 + 1]
            out[head, j] = max(near) if scorer.pooling == "max" else sum(near) / scorer.kernel
    return out


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize(("window", "kernel"), [(8, 5), (1, 1), (32, 7), (100, 3)])
def test_equals_the_whole_matrix_for_every_padded_row(window: int, kernel: int, pooling: str, reduce: str) -> None:
    scorer = SnapKV(window=window, kernel=kernel, pooling=pooling, reduce=reduce)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(window)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 9, 1)]
    got = scorer.score(held_of(rows, scorer.needs))
    for i, row in enumerate(rows):
        torch.testing.assert_close(got[i, :, 63 - row.tokens :], naive(row, scorer), rtol=1e-5, atol=1e-6)


def line(keys: list[float], window: int) -> Held:
    """One head of size 1 whose queries are all 1, so that logits are the keys."""
    n = len(keys)
    return Held(
        keys=torch.tensor(keys).view(1, 1, n, 1),
        values=torch.zeros(1, 1, n, 1),
        positions=torch.arange(n).view(1, 1, n),
        valid=torch.ones(1, 1, n, dtype=torch.bool),
        first=torch.zeros(1, dtype=torch.int64),
        seen=n,
        layer=0,
        layers=1,
        scaling=1.0,
        queries=torch.ones(1, 1, window, 1),
        query_columns=torch.arange(n - window, n),
    )


def test_worked_by_hand() -> None:
    held = line([math.log(x) for x in (1, 2, 3, 4)], window=1)  # probabilities 0.1, 0.2, 0.3, 0.4
    plain = SnapKV(window=1, kernel=1).score(held)[0, 0]
    torch.testing.assert_close(plain, torch.tensor([0.1, 0.2, 0.3, 0.0]))
    average = SnapKV(window=1, kernel=3).score(held)[0, 0]
    torch.testing.assert_close(average, torch.tensor([0.1, 0.2, 0.5 / 3, 0.0]))
    most = SnapKV(window=1, kernel=3, pooling="max").score(held)[0, 0]
    torch.testing.assert_close(most, torch.tensor([0.2, 0.3, 0.3, 0.0]))


def test_the_window_is_causal_inside() -> None:
    held = line([math.log(x) for x in (1, 1, 2, 4)], window=2)  # 1/4 each before the newest, then 1/8 each
    got = SnapKV(window=2, kernel=1).score(held)[0, 0]
    torch.testing.assert_close(got, torch.tensor([0.375, 0.375, 0.0, 0.0]))


def test_a_query_of_padding_between_turns_does_not_vote() -> None:
    held = line([math.log(x) for x in (1, 3, 7, 1, 4)], window=2)
    padded = dataclasses.replace(held, valid=torch.tensor([[[True, True, True, False, True]]]))
    got = SnapKV(window=2, kernel=1).score(padded)[0, 0]
    torch.testing.assert_close(got, torch.tensor([1 / 15, 3 / 15, 7 / 15, 0.0, 0.0]))


def test_half_precision_accumulates_in_float32() -> None:
    scorer = SnapKV(window=16)
    row = make_row(63, heads=2, group=4, size=16, generator=torch.Generator().manual_seed(0))
    half = dataclasses.replace(row, keys=row.keys.bfloat16().float(), queries=row.queries.bfloat16().float())
    exact = scorer.score(held_of([half], scorer.needs))
    torch.testing.assert_close(scorer.score(held_of([row], scorer.needs, dtype=torch.bfloat16)), exact)


def test_says_what_it_needs() -> None:
    assert SnapKV(window=7).needs == Needs(window=7) and SnapKV(window=7).recent == 7
    row = make_row(5, heads=1, group=1, size=2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="last 7 queries"):
        SnapKV(window=7).score(held_of([row], Needs()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"window": 0}, "window"), ({"kernel": 4}, "odd"), ({"pooling": "min"}, "pooling"), ({"reduce": "min"}, "reduce")],
)
def test_refuses_wrong_settings(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SnapKV(**wrong)  # type: ignore[arg-type]


def test_by_default_a_look_at_where_a_number_begins_keeps_its_last_digit() -> None:
    """The paper's kernel of 5 reaches two tokens further, and a code of nine digits ends eight tokens further."""
    votes = [0.0] * 64 + [9.0] + [0.0] * 95
    held = line(votes, window=1)
    begins, ends = 64, 72
    scores = SnapKV(window=1).score(held)[0, 0]
    narrow = SnapKV(window=1, kernel=5).score(held)[0, 0]
    assert scores[ends] > 10 * scores[20] and torch.isclose(scores[begins], scores[ends], rtol=1e-3)
    assert narrow[ends] < 2 * narrow[20]
