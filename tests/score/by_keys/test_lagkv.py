"""LagKV against loops over partitions, and partitions worked by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch
from tests.support.held_rows import Row, held_of, make_row, row_of
from torch import Tensor

from kvtailor.score.by_keys.lagkv import LagKV
from kvtailor.select.topk import TopK
from kvtailor.types import Held, Needs


def informations(states: list[list[float]], sinks: int, lag: int) -> dict[int, float]:
    """For one head's keys or values: by token, its share of the softmax in each partition that has another behind."""
    found = {}
    for start in range(sinks, len(states) - 2 * lag + 1, lag):
        ruler = list(zip(*states[start + lag : start + 2 * lag], strict=True))
        spread = []
        for token in states[start : start + lag]:
            measured = [(x - min(r)) / (max(r) - min(r)) for x, r in zip(token, ruler, strict=True)]
            spread.append(statistics.stdev(measured))
        shares = [math.exp(each - max(spread)) for each in spread]
        found |= {start + i: each / sum(shares) for i, each in enumerate(shares)}
    return found


def naive_kept(row: Row, head: int, sinks: int, lag: int, share: int) -> list[int]:
    """The sinks, the best `share` of each partition, and all from the last full partition on."""
    keys, values = (informations(s[head].double().tolist(), sinks, lag) for s in (row.keys, row.values))
    total = {token: keys[token] + values[token] for token in keys}
    kept = list(range(sinks))
    for start in range(sinks, sinks + len(total), lag):
        kept += sorted(sorted(range(start, start + lag), key=lambda token: -total[token])[:share])
    return kept + list(range(sinks + len(total), row.tokens))


@pytest.mark.parametrize(("sinks", "lag"), [(4, 8), (0, 5), (7, 2), (16, 23)])
def test_keeps_what_loops_over_partitions_keep_in_every_padded_row(sinks: int, lag: int) -> None:
    generator = torch.Generator().manual_seed(lag)
    rows = [make_row(n, heads=3, group=1, size=7, generator=generator) for n in (63, 40, 9)]
    share = lag // 2
    kept = [[naive_kept(row, head, min(sinks, row.tokens), lag, share) for head in range(3)] for row in rows]
    budgets = torch.tensor([[len(each) for each in of_row] for of_row in kept])
    held = held_of(rows, Needs())
    got = TopK().select(LagKV(sinks=sinks, lag=lag).score(held).masked_fill(~held.valid, -torch.inf), budgets)
    for i, row in enumerate(rows):
        pad = 63 - row.tokens
        for head in range(3):
            assert (torch.nonzero(got[i, head]).flatten() - pad).tolist() == kept[i][head]


def line(keys: list[tuple[float, float]]) -> Held:
    """One head of size 2 whose values are its keys."""
    return held_of([row_of(torch.tensor([keys]))], Needs())


# Ruler (0, 0) to (2, 4). Measured: (1, 1/2), (0, 1) and (1, 1); deviations 1/(2 sqrt 2), 1/sqrt 2 and 0.
WORKED = [(9.0, 9.0), (2.0, 2.0), (0.0, 4.0), (2.0, 4.0), (0.0, 4.0), (2.0, 0.0), (1.0, 1.0), (5.0, 5.0)]


def test_worked_by_hand() -> None:
    scores = LagKV(sinks=1, lag=3).score(line(WORKED))[0, 0]
    assert scores[1:4].tolist() == pytest.approx([1 / 3, 2 / 3, 0.0])
    # Behind them the last full partition and one token more, the newest highest; the sink above all.
    assert scores.argsort(descending=True).tolist() == [0, 7, 6, 5, 4, 2, 1, 3]
    assert (scores[4:] > 1).all()
    compete = LagKV(sinks=1, lag=3, compete=True).score(line(WORKED))[0, 0, 1:4]
    shares = torch.tensor([math.exp(1 / math.sqrt(8)), math.exp(1 / math.sqrt(2)), 1.0])
    torch.testing.assert_close(compete, shares / shares.sum())


def test_too_short_for_two_partitions_is_sinks_and_recents() -> None:
    row = make_row(63, heads=2, group=1, size=3, generator=torch.Generator().manual_seed(0))
    scores = LagKV(sinks=4, lag=30).score(held_of([row], Needs()))
    kept = TopK().select(scores, torch.full((1, 2), 10))
    assert torch.nonzero(kept[0, 1]).flatten().tolist() == [0, 1, 2, 3, 57, 58, 59, 60, 61, 62]
    # No two are equal, so that heads that share one pool get equally many.
    assert (scores[..., :4].diff(dim=-1) < 0).all() and (scores[..., 4:].diff(dim=-1) > 0).all()


def test_partitions_run_over_what_is_held() -> None:
    """Tokens that were dropped leave no gap: the columns of what is held make no difference."""
    held = line(WORKED)
    dropped = dataclasses.replace(held, positions=torch.tensor([[[0, 3, 4, 9, 20, 21, 22, 30]]]), seen=31)
    assert torch.equal(LagKV(sinks=1, lag=3).score(held), LagKV(sinks=1, lag=3).score(dropped))


def test_every_partition_keeps_its_share_unless_they_compete() -> None:
    generator = torch.Generator().manual_seed(5)
    row = make_row(64, heads=1, group=1, size=4, generator=generator)
    calm = torch.ones(64, 1)
    calm[:16] = 0.01
    row = dataclasses.replace(row, keys=row.keys * calm, values=row.values * calm)

    def kept(scorer: LagKV) -> Tensor:
        chosen = TopK().select(scorer.score(held_of([row], Needs())), torch.tensor([[16 + 12]]))
        return chosen[0, 0].view(4, 16).sum(-1)

    assert kept(LagKV(sinks=0, lag=16)).tolist() == [4, 4, 4, 16]
    assert kept(LagKV(sinks=0, lag=16, compete=True)).tolist() != [4, 4, 4, 16]


def test_a_channel_that_does_not_vary_says_nothing() -> None:
    flat = [(1.0, 7.0), (0.0, 7.0), (2.0, 9.0), (3.0, 5.0), (4.0, 5.0), (5.0, 5.0)]
    barely = [*flat[:3], (3.0, 0.0), (4.0, 1e-45), (5.0, 0.0)]
    # Measured -1, -3/2 and -1/2 in the first channel, and 0 in the other.
    shares = torch.tensor([math.exp(x / math.sqrt(2)) for x in (1.0, 1.5, 0.5)])
    for keys in (flat, barely):
        compete = LagKV(sinks=0, lag=3, compete=True).score(line(keys))[0, 0, :3]
        torch.testing.assert_close(compete, shares / shares.sum())
        assert LagKV(sinks=0, lag=3).score(line(keys))[0, 0, :3].tolist() == pytest.approx([1 / 3, 2 / 3, 0.0])


def test_a_ruler_that_is_far_too_short_gives_finite_scores() -> None:
    keys = [(1.0, 1e10), (0.0, 7.0), (2.0, 9.0), (3.0, 0.0), (4.0, 1e-11), (5.0, 0.0)]
    compete = LagKV(sinks=0, lag=3, compete=True).score(line(keys))[0, 0]
    assert compete.isfinite().all() and compete[0] == 1.0


def test_flops_of_two_partitions_and_a_tail() -> None:
    scorer = LagKV(sinks=1, lag=3)
    # Of 8 tokens behind the sink the first partition of 3 is scored, of 10 the first two.
    assert [scorer.flops(tokens=n, group=2, size=2) for n in (6, 8, 10)] == [0, 3 * 35 + 4, 2 * (3 * 35 + 4)]


def test_settings() -> None:
    assert (LagKV().sinks, LagKV().lag, LagKV().recent, LagKV().slack) == (16, 128, 0, 128)
    with pytest.raises(ValueError, match=r"^lagkv: sinks must be 0 or more tokens, found -1"):
        LagKV(sinks=-1)
    with pytest.raises(ValueError, match=r"^lagkv: lag must be at least 2 tokens, found 1"):
        LagKV(lag=1)
