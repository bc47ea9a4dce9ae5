"""R-KV against plain loops: importance of the newest queries, redundancy of keys, and what both make."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.held_rows import Row, held_of, make_row, row_of
from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.plan import Plan
from kvtailor.score.decoding import rkv
from kvtailor.score.decoding.rkv import RKV
from kvtailor.types import Softmax


def naive(row: Row, scorer: RKV, cap: float | None = None) -> Tensor:
    """(h, n), one number at a time."""
    heads, n, size = row.keys.shape
    group, window = row.queries.shape[0] // heads, min(scorer.window, n)
    scores = torch.zeros(heads, n)
    for head in range(heads):
        votes = [0.0] * n
        for query in range(n - window, n):
            logits = []
            for token in range(n - window):
                each = [
                    float(row.queries[head * group + g, query].double() @ row.keys[head, token].double())
                    / math.sqrt(size)
                    for g in range(group)
                ]
                logits.append(max(each if cap is None else [cap * math.tanh(one / cap) for one in each]))
            total = sum(math.exp(one) for one in logits)
            for token, one in enumerate(logits):
                votes[token] += math.exp(one) / total / window
        reach = scorer.kernel // 2
        pooled = [max(votes[max(0, j - reach) : min(n - window, j + reach + 1)], default=0.0) for j in range(n)]
        mean = [0.0] * n
        for i in range(n):
            line = []
            for j in range(n):
                one, two = row.keys[head, i].double(), row.keys[head, j].double()
                line.append(0.0 if i == j else float(one @ two / (one.norm() * two.norm())))
            newest = max((j for j in range(n) if j != i and line[j] > scorer.alike), default=-1)
            for j in range(n):
                mean[j] += 0.0 if j == newest else line[j] / n
        total = sum(math.exp(one) for one in mean)
        for j in range(n):
            importance = pooled[j] if j < n - window else 0.0
            scores[head, j] = scorer.weight * importance - (1 - scorer.weight) * math.exp(mean[j]) / total
    return scores


@pytest.mark.parametrize(("weight", "alike", "cap"), [(0.1, 0.5, None), (0.6, 0.1, 2.0)])
def test_equals_plain_loops_for_every_padded_row(weight: float, alike: float, cap: float | None) -> None:
    scorer = RKV(window=5, weight=weight, alike=alike, kernel=3)
    generator = torch.Generator().manual_seed(3)
    rows = [make_row(n, heads=3, group=2, size=4, generator=generator) for n in (63, 20, 3)]
    held = dataclasses.replace(held_of(rows, scorer.needs), softmax=Softmax(softcap=cap))
    got = scorer.score(held)
    for i, row in enumerate(rows):
        torch.testing.assert_close(got[i, :, 63 - row.tokens :], naive(row, scorer, cap), rtol=1e-4, atol=1e-6)


def test_of_tokens_that_are_alike_the_newest_is_kept() -> None:
    """Six tokens point in directions of their own, and the other six in one."""
    keys = torch.cat([torch.eye(7)[:6], torch.eye(7)[6].expand(6, -1)])[
        torch.tensor([0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11])
    ]
    scorer = RKV(window=1, weight=0.0)
    scores = scorer.score(held_of([row_of(keys[None])], scorer.needs))[0, 0]
    alike = torch.tensor([1, 3, 5, 7, 9, 11])
    assert bool((scores[alike[:-1]] < scores[torch.tensor([0, 2, 4, 6, 8, 10])].min()).all())
    assert scores[11] > scores[alike[:-1]].max()


def test_more_than_a_block_of_tokens() -> None:
    scorer = RKV(window=5, kernel=3)
    rows = [make_row(300, heads=1, group=1, size=4, generator=torch.Generator().manual_seed(5))]
    whole = scorer.score(held_of(rows, scorer.needs))[0, 0]
    directions = torch.nn.functional.normalize(rows[0].keys[0], dim=-1)
    cosines = (directions @ directions.T).fill_diagonal_(0.0)
    newest = torch.where(cosines > 0.5, torch.arange(300), -1).amax(-1)
    cosines[torch.arange(300)[newest >= 0], newest[newest >= 0]] = 0.0
    # Inside of the window a score is the redundancy alone.
    torch.testing.assert_close(whole[-5:], -0.9 * cosines.mean(0).softmax(-1)[-5:], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("alike", [0.5, -0.2, 0.95])
@pytest.mark.parametrize(
    ("form", "rows", "pairs", "block"),
    [
        ("auto", 2048, 1 << 18, 128),
        ("reference", 2048, 1 << 18, 128),
        ("reference", 50, 1, 7),
        ("reference", 1000, 400, 1),
    ],
)
def test_the_newest_that_is_alike_is_found_a_few_columns_at_a_time(
    alike: float, form: str, rows: int, pairs: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys with a direction in common, as a model's are, so that most tokens have their answer early; some have not."""
    for name, value in (("_ROWS", rows), ("_PAIRS", pairs), ("_BLOCK", block)):
        monkeypatch.setattr(rkv, name, value)
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn(3, 131, 5, generator=generator)
    keys += 2 * torch.randn(3, 1, 5, generator=generator) * (torch.rand(3, 131, 1, generator=generator) < 0.7)
    valid = torch.ones(3, 131, dtype=torch.bool)
    valid[1, :9] = valid[2, :100] = False
    directions = torch.nn.functional.normalize(keys, dim=-1).masked_fill(~valid[..., None], 0.0)
    cosines = (directions @ directions.transpose(1, 2)).double()
    with dispatch.using(form):
        got = rkv._newest_alike(directions, valid, alike).tolist()
    for row, i in valid.nonzero().tolist():
        found = [j + 1 for j in range(131) if valid[row, j] and j != i and cosines[row, i, j] > alike]
        assert got[row][i] == max(found, default=0)


def test_refuses_what_makes_no_sense_and_acts_while_decoding() -> None:
    for wrong, said in (
        ({"window": 0}, "window must be at least 1"),
        ({"weight": 1.5}, "weight must be from 0 to 1"),
        ({"alike": 2.0}, "a cosine"),
        ({"kernel": 2}, "kernel must be odd"),
    ):
        with pytest.raises(ValueError, match=said):
            RKV(**wrong)
    assert Plan.parse("rkv @ tokens=64").slack_tokens == 128
