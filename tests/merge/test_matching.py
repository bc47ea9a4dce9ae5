"""Matching: the whole against a naive loop with SciPy's solvers, never worse than dropping, exact for equal keys."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.fit_by_hand import fit_by_hand
from tests.support.held_rows import held_of, make_row, row_of
from torch import Tensor

from kvtailor.merge.matching import Matching
from kvtailor.ops.attention.definition import reference
from kvtailor.types import Held, Needs, Softmax

HEADS, GROUP, SIZE = 3, 2, 8
SMALL = Matching(window=6, spread=5)


def held_for(merger: Matching, lengths: tuple[int, ...] = (63, 40, 7), seed: int = 1, sharp: float = 1.0) -> Held:
    """Padded rows; values have a mean, or more attention for what is kept would bring no output closer."""
    generator = torch.Generator().manual_seed(seed)
    rows = [make_row(n, heads=HEADS, group=GROUP, size=SIZE, generator=generator) for n in lengths]
    return held_of([replace(row, queries=row.queries * sharp, values=row.values + 1) for row in rows], merger.needs)


def kept_of(held: Held, share: float = 0.4, seed: int = 3) -> Tensor:
    keep = torch.rand(held.valid.shape, generator=torch.Generator().manual_seed(seed)) < share
    return (keep | (held.positions == held.seen - 1)) & held.valid


def turned(query: Tensor, by: int) -> Tensor:
    """Channels 0 and 2, and 1 and 3, are planes that turn by 1 and 0.1 a position; see `held_of`."""
    found = query.clone()
    for plane, frequency in enumerate((1.0, 0.1)):
        cos, sin = math.cos(frequency * by), math.sin(frequency * by)
        found[plane] = query[plane] * cos - query[plane + 2] * sin
        found[plane + 2] = query[plane] * sin + query[plane + 2] * cos
    return found


def queries_of(held: Held, merger: Matching, row: int, head: int) -> list[tuple[Tensor, int]]:
    """Each reference query of one query head, and its column."""
    found = []
    if held.repeated is not None:
        there = held.repeated_columns[row] >= 0
        found += [(query.double(), held.seen) for query in held.repeated[row, head][there]]
    if merger.spread:
        for query, column in zip(held.sampled[row, head].double(), held.sampled_columns[row].tolist(), strict=True):
            if column >= 0:
                found.append((turned(query, held.seen - column), held.seen) if merger.turned else (query, column))
    if merger.window:
        for query, column in zip(held.queries[row, head].double(), held.query_columns.tolist(), strict=True):
            if ((held.positions[row] == column) & held.valid[row]).any():
                found.append((query, column))
    return found


def naive(merger: Matching, held: Held, keep: Tensor, into: Tensor) -> list[tuple[Tensor, Tensor, float, float]]:
    """For each row and head: its kept tokens' values and log weights; errors of dropping and of it."""
    found = []
    for row in range(keep.shape[0]):
        for head in range(HEADS):
            tokens = held.valid[row, head].nonzero()[:, 0].tolist()
            kept = [i for i in tokens if keep[row, head, i]]
            open_ones = [i for i in kept if into[row, head, i]]
            values = {i: held.values[row, head, i].double() for i in tokens}
            before = {i: 0.0 if held.log_weight is None else float(held.log_weight[row, head, i]) for i in tokens}
            log_weight = dict(before)
            error = (0.0, 0.0)
            if open_ones and len(kept) < len(tokens):
                error = fit(merger, held, (row, head), tokens, kept, open_ones, values, log_weight)
            weights = torch.tensor([log_weight[i] for i in kept])
            found.append((torch.stack([values[i] for i in kept]), weights, *error))
    return found


def fit(merger, held, at, tokens, kept, open_ones, values, log_weight) -> tuple[float, float]:
    """Changes the values and weights of the open tokens of one row and head; both errors."""
    (row, head), softmax = at, held.softmax
    rows, whole, summed, rest, others = [], [], [], [], []
    for query_head in range(head * GROUP, (head + 1) * GROUP):
        for query, column in queries_of(held, merger, row, query_head):
            counts = {}
            for i in tokens:
                if held.positions[row, head, i] <= column:
                    logit = float(query @ held.keys[row, head, i].double()) * held.scaling
                    logit = logit if softmax.softcap is None else softmax.softcap * math.tanh(logit / softmax.softcap)
                    counts[i] = math.exp(logit + log_weight[i])
            if not counts:
                continue
            sink = 0.0 if softmax.sinks is None else math.exp(float(softmax.sinks[query_head]))
            total = sum(counts.values()) + sink
            given = {i: counts.get(i, 0.0) / total for i in tokens}
            matched = [i for i in tokens if i in open_ones or i not in kept]
            fixed = [i for i in kept if i not in open_ones]
            rows.append([given[i] for i in open_ones])
            whole.append(sum(given[i] for i in matched))
            summed.append(sum((given[i] * values[i] for i in matched), torch.zeros_like(values[tokens[0]])).numpy())
            rest.append(sum(given[i] for i in fixed) + sink / total)
            others.append(sum((given[i] * values[i] for i in fixed), torch.zeros_like(values[tokens[0]])).numpy())
    if not rows:
        return 0.0, 0.0
    old = np.stack([values[i].numpy() for i in open_ones])
    factors, new, *errors = fit_by_hand(merger, *map(np.array, (rows, whole, summed, rest, others)), old)
    if errors[1] < errors[0]:
        for i, value, factor in zip(open_ones, new, factors, strict=True):
            values[i] = torch.from_numpy(value)
            log_weight[i] += math.log(factor)
    return errors[0], errors[1]


def check(merger: Matching, held: Held, keep: Tensor, into: Tensor | None = None) -> list[float]:
    """Compares with the naive loop; what is left of each head's error of dropping."""
    into = keep if into is None else into
    merged, left = merger.merge(held, keep, into), []
    counts = keep.sum(-1).flatten().tolist()
    for n, values, weights, (expected, log_weight, dropped, fitted) in zip(
        counts,
        merged.values.flatten(0, 1),
        merged.log_weight.flatten(0, 1),
        naive(merger, held, keep, into),
        strict=True,
    ):
        assert torch.allclose(values[:n].double(), expected, rtol=1e-4, atol=1e-4)
        assert torch.allclose(weights[:n].double(), log_weight.double(), rtol=1e-4, atol=1e-4)
        left.append(min(fitted, dropped) / max(dropped, 1e-30))
    return left


@pytest.mark.parametrize(
    "merger",
    [
        SMALL,
        replace(SMALL, spread=0),
        replace(SMALL, window=0, turned=False),
        replace(SMALL, fit="weights", bound=0.5),
        replace(SMALL, fit="values", ridge=1.0),
        replace(SMALL, spread=63, ridge=1e-3),
    ],
    ids=lambda merger: f"{merger.fit} {merger.window} {merger.spread}",
)
def test_equals_a_naive_loop(merger: Matching) -> None:
    """Padded rows of 63, 40 and 7 tokens, ragged heads; then only some may change, and each has a weight already."""
    held = held_for(merger)
    keep = kept_of(held)
    assert min(check(merger, held, keep)) < 0.9
    open_ones = keep & (held.positions < held.seen - 4) & (held.positions % 5 > 0)
    weights = torch.randn(keep.shape, generator=torch.Generator().manual_seed(8))
    check(merger, replace(held, log_weight=weights), keep, open_ones)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("merger", [SMALL, Matching(window=0, spread=0, repeat=4)], ids=["besides", "alone"])
def test_equals_a_naive_loop_with_caps_and_sinks_and_a_repetition(
    merger: Matching, softcap: float | None, sinks: bool
) -> None:
    held = held_for(merger, (33, 21))
    generator = torch.Generator().manual_seed(6)
    held = replace(
        held,
        softmax=Softmax(softcap=softcap, sinks=torch.randn(HEADS * GROUP, generator=generator) if sinks else None),
        repeated=torch.randn(2, HEADS * GROUP, 4, SIZE, generator=generator),
        repeated_columns=torch.tensor([[0, 1, 2, 3], [0, 2, -1, -1]]),
    )
    assert min(check(merger, held, kept_of(held))) < 0.9


def test_blocks_of_tokens_and_of_heads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_for(SMALL)
    keep = kept_of(held)
    expected = SMALL.merge(held, keep, keep)
    monkeypatch.setattr("kvtailor.ops.attention.references._SCRATCH", 100)
    monkeypatch.setattr("kvtailor.ops.least_squares._BLOCK", 4)
    monkeypatch.setattr("kvtailor.merge.matching._SCRATCH", 400)
    found = SMALL.merge(held, keep, keep)
    assert torch.allclose(found.values, expected.values, atol=1e-4)
    assert torch.allclose(found.log_weight, expected.log_weight, atol=1e-4)


def outputs(held: Held, merger: Matching, row: int, head: int, states: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """(2 r, dv) outputs of the reference queries over keys, values, log weights and positions of one row and head: by
    themselves, and beside a later token of no value, with the attention that everything held has."""
    keys, values, weights, positions = states
    there = held.valid[row, head]
    found = []
    for query_head in range(head * GROUP, (head + 1) * GROUP):
        for query, column in queries_of(held, merger, row, query_head):
            logits = keys.double() @ query * held.scaling + weights.double()
            logits = logits.masked_fill(positions > column, -torch.inf)
            every = held.keys[row, head][there].double() @ query * held.scaling
            later = every.masked_fill(held.positions[row, head][there] > column, -torch.inf).logsumexp(0)
            for beside in (-torch.inf, later):
                whole = torch.cat([logits, torch.as_tensor(beside).double().view(1)])
                found.append(whole.softmax(-1).nan_to_num(0.0)[:-1] @ values.double())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fit", ["both", "weights", "values"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95], ids=str)
def test_no_head_is_further_from_its_outputs_than_by_dropping(dtype: torch.dtype, fit: str, share: float) -> None:
    """As it is stored, so that rounding counts. Weights alone would be, for some heads, which are left as dropped."""
    merger = replace(SMALL, fit=fit, turned=False)
    held = held_for(merger, sharp=2.0)
    held = replace(held, keys=held.keys.to(dtype), values=held.values.to(dtype))
    keep = kept_of(held, share)
    merged, closer = merger.merge(held, keep, keep), 0
    for row in range(keep.shape[0]):
        for head in range(HEADS):
            kept, valid = keep[row, head], held.valid[row, head]
            every, place = held.positions[row, head], held.positions[row, head][kept]
            keys, values = held.keys[row, head], held.values[row, head]
            n, zeros = int(kept.sum()), torch.zeros(len(every))
            aim = outputs(held, merger, row, head, (keys[valid], values[valid], zeros[valid], every[valid]))
            dropped = outputs(held, merger, row, head, (keys[kept], values[kept], zeros[kept], place))
            mine = merged.keys[row, head, :n], merged.values[row, head, :n], merged.log_weight[row, head, :n], place
            before, now = ((one - aim).square().sum() for one in (dropped, outputs(held, merger, row, head, mine)))
            assert now <= before * (1 + 1e-5)
            closer += bool(now < before * 0.99)
    assert closer or fit == "weights"


def test_equal_keys_are_merged_without_loss_for_any_query_and_again() -> None:
    """Runs of 3 and of 2 of equal keys become one token each, with the mean of their values; then two of these one."""
    merger = Matching(window=40, spread=0, ridge=1e-9)
    generator = torch.Generator().manual_seed(3)
    runs = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])
    keys = torch.randn(1, 2, SIZE, generator=generator)[:, runs // 2]
    made = row_of(
        keys, torch.randn(1, 10, SIZE, generator=generator), torch.randn(2, 10, SIZE, generator=generator) * 2
    )
    held = held_of([made], Needs(window=10))
    # Queries that come after all of it.
    later = torch.randn(1, 2, 40, SIZE, generator=generator) * 2
    held = replace(held, queries=later, query_columns=torch.full((40,), 9))
    query = torch.randn(1, 2, 7, SIZE, generator=generator) * 3
    expected = reference(query.double(), held.keys, held.values, None, held.scaling)[0]
    for first, counts in (([0, 3, 5, 9], [3, 2, 3, 2]), ([0, 3], [5, 5])):
        keep = torch.zeros_like(held.valid)
        keep[..., first] = True
        merged = merger.merge(held, keep, keep)
        held = replace(
            held,
            keys=merged.keys,
            values=merged.values,
            log_weight=merged.log_weight,
            positions=held.positions[..., first],
            valid=held.valid[..., first],
        )
        found = reference(query.double(), held.keys, held.values, None, held.scaling, held.log_weight)[0]
        assert (found - expected).abs().max() < 1e-4
        # Of two kept tokens with one key only the sum of their weights is determined.
        assert float(held.log_weight.exp().sum()) == pytest.approx(sum(counts), rel=1e-4)
    assert held.log_weight.exp().flatten().tolist() == pytest.approx([5, 5], rel=1e-3)


def test_no_query_at_all_is_dropping() -> None:
    """Where no query of a row takes part, as in one whose newest tokens are padding, nothing changes."""
    merger = replace(SMALL, spread=0)
    held = held_for(merger)
    held = replace(held, query_columns=held.query_columns + 1000)
    keep = kept_of(held)
    merged = merger.merge(held, keep, keep)
    assert not merged.log_weight.any() and torch.equal(
        merged.values[0, 0, : keep[0, 0].sum()], held.values[keep][: keep[0, 0].sum()]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window": 0, "spread": 0, "repeat": 0}, "at least one query"),
        ({"ridge": 0.0}, "ridge must be above 0"),
        ({"bound": 0.0}, "bound must be above 0"),
        ({"fit": "keys"}, "fit must be one of both, weights, values"),
    ],
    ids=str,
)
def test_refuses_what_makes_no_sense(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^matching: .*{said}"):
        Matching(**given)


def test_refuses_what_lacks_its_queries() -> None:
    held = held_for(SMALL)
    with pytest.raises(ValueError, match="matching fits to the last 32 queries and 128 spread ones"):
        Matching().merge(replace(held, queries=None), held.valid, held.valid)
