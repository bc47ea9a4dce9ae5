"""What the stage `merge` promises, tested on every method in its folder."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from tests.support.discover import methods_of, samples_of
from tests.support.held_rows import Row, held_of, make_row, with_holes
from torch import Tensor

import kvtailor.merge
from kvtailor.merge.contract import Merged, Merger
from kvtailor.plan.arguments import word_of
from kvtailor.types import Held

MERGERS = [each for kind in methods_of(kvtailor.merge, Merger) for each in samples_of(kind)]
every_merger = pytest.mark.parametrize("merger", MERGERS, ids=lambda merger: str(word_of(merger)))
LENGTHS, HEADS, GROUP, SIZE = (63, 40, 7), 3, 2, 8


def rows(seed: int = 1) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [make_row(n, heads=HEADS, group=GROUP, size=SIZE, generator=generator) for n in LENGTHS]


def held_by(merger: Merger, some: list[Row], **given: object) -> Held:
    return held_of(some, merger.needs, **given)  # type: ignore[arg-type]


def kept_of(held: Held, share: float = 0.4, seed: int = 3) -> Tensor:
    """A ragged kept set, drawn row by row from the right, so that padding changes nothing; the newest is kept."""
    draw = torch.rand((*held.valid.shape[:2], 64), generator=torch.Generator().manual_seed(seed))
    keep = draw[..., 64 - held.valid.shape[-1] :] < share
    keep[..., -1] = True
    return keep & held.valid


def kept_states(states: Tensor, keep: Tensor) -> list[Tensor]:
    """The kept states (k, d) of each row and head."""
    return [state[there] for state, there in zip(states.flatten(0, 1), keep.flatten(0, 1), strict=True)]


def lanes(merged: Merged | None, held: Held, keep: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and log weights of each row's and head's kept tokens, without filler."""
    if merged is None:
        nothing = [torch.zeros(int(count)) for count in keep.sum(-1).flatten()]
        return list(zip(kept_states(held.keys, keep), kept_states(held.values, keep), nothing, strict=True))
    weights = torch.zeros(merged.keys.shape[:3]) if merged.log_weight is None else merged.log_weight
    counts = keep.sum(-1).flatten().tolist()
    flat = (merged.keys.flatten(0, 1), merged.values.flatten(0, 1), weights.flatten(0, 1))
    return [(flat[0][i, :n], flat[1][i, :n], flat[2][i, :n]) for i, n in enumerate(counts)]


def same(one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]], tolerance: float = 2e-5) -> bool:
    return len(one) == len(other) and all(
        mine.shape == theirs.shape and torch.allclose(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance)
        for ours, others in zip(one, other, strict=True)
        for mine, theirs in zip(ours, others, strict=True)
    )


def asked(merger: Merger, held: Held, keep: Tensor, into: Tensor | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
    return lanes(merger.merge(held, keep, keep if into is None else into), held, keep)


def test_the_folder_holds_methods() -> None:
    assert {"Drop", "D2O", "CaM"} <= {type(merger).__name__ for merger in MERGERS}


@every_merger
def test_is_a_frozen_keyword_only_dataclass(merger: Merger) -> None:
    assert dataclasses.is_dataclass(merger) and hash(merger) == hash(replace(merger))
    assert all(field.kw_only for field in dataclasses.fields(merger))


@every_merger
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gives_as_many_tokens_as_are_kept_in_their_dtype_and_changes_no_input(
    merger: Merger, dtype: torch.dtype
) -> None:
    held = held_by(merger, rows(), dtype=dtype)
    keep = kept_of(held)
    before = [each.clone() for each in (held.keys, held.values, keep)]
    merged = merger.merge(held, keep, keep)
    assert all(torch.equal(*pair) for pair in zip((held.keys, held.values, keep), before, strict=True))
    if merged is None:
        return
    most = int(keep.sum(-1).max())
    assert merged.keys.shape == (3, HEADS, most, SIZE) and merged.values.shape == (3, HEADS, most, SIZE + 1)
    assert merged.keys.dtype == merged.values.dtype == dtype
    assert torch.isfinite(merged.keys).all() and torch.isfinite(merged.values).all(), "filler included"
    assert (merged.log_weight is not None) == merger.weighted
    if merged.log_weight is not None:
        assert merged.log_weight.dtype == torch.float32 and merged.log_weight.shape == (3, HEADS, most)
    exact = asked(merger, held_by(merger, rows()), keep)
    rounding = {torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    close = [
        float((mine.float() - theirs).abs().max()) <= 4 * rounding * float(theirs.abs().max())
        for ours, others in zip(lanes(merged, held, keep), exact, strict=True)
        for mine, theirs in zip(ours[1:], others[1:], strict=True)
    ]
    # Which key is nearest may turn over where keys are rounded; most do not.
    assert sum(close) >= 0.8 * len(close)


@every_merger
def test_only_what_may_take_in_changes(merger: Merger) -> None:
    held = held_by(merger, rows())
    keep = kept_of(held)
    into = keep & (torch.rand(keep.shape, generator=torch.Generator().manual_seed(9)) < 0.5)
    plain = list(zip(kept_states(held.keys, keep), kept_states(held.values, keep), strict=True))
    closed = [at[there] for at, there in zip(~into.flatten(0, 1), keep.flatten(0, 1), strict=True)]
    for (keys, values, weights), (was_keys, was_values), shut in zip(
        asked(merger, held, keep, into), plain, closed, strict=True
    ):
        assert torch.equal(keys[shut], was_keys[shut]) and torch.equal(values[shut], was_values[shut])
        assert (weights[shut] == 0).all()
    for (keys, values, weights), (was_keys, was_values) in zip(
        asked(merger, held, keep, torch.zeros_like(keep)), plain, strict=True
    ):
        assert torch.equal(keys, was_keys) and torch.equal(values, was_values) and not weights.any()


@every_merger
def test_where_all_is_kept_nothing_changes(merger: Merger) -> None:
    held = held_by(merger, rows())
    keep = held.valid.clone()
    for (keys, values, weights), was_keys, was_values in zip(
        asked(merger, held, keep), kept_states(held.keys, keep), kept_states(held.values, keep), strict=True
    ):
        assert torch.equal(keys, was_keys) and torch.equal(values, was_values) and not weights.any()


@every_merger
def test_most_of_them_change_something(merger: Merger) -> None:
    """Else all that stands here would be true of nothing."""
    held = held_by(merger, rows())
    keep = kept_of(held)
    changed = not same(asked(merger, held, keep), asked(kvtailor.plan.registry.load("merge", "drop")(), held, keep))
    assert changed == (type(merger).__name__ != "Drop")


@every_merger
def test_a_row_of_a_padded_batch_gets_what_it_gets_alone(merger: Merger) -> None:
    some = rows()
    held = held_by(merger, some)
    keep = kept_of(held)
    together = asked(merger, held, keep)
    for i, row in enumerate(some):
        alone = held_by(merger, [row])
        mine = keep[i : i + 1, :, keep.shape[-1] - row.tokens :]
        assert same(asked(merger, alone, mine), together[i * HEADS : (i + 1) * HEADS])


@every_merger
def test_padding_and_filler_are_not_even_looked_at(merger: Merger) -> None:
    held = held_by(merger, rows())
    keep = kept_of(held)
    expected = asked(merger, held, keep)
    poison = (~held.valid)[..., None]
    wrong = replace(
        held,
        keys=held.keys.masked_fill(poison, float("inf")),
        values=held.values.masked_fill(poison, float("nan")),
    )
    assert same(asked(merger, wrong, keep), expected)
    holed, where = with_holes(held, 5, torch.Generator().manual_seed(4))
    moved = torch.zeros_like(holed.valid).scatter(2, where, keep)
    assert same(asked(merger, holed, moved), expected)


@every_merger
def test_nan_in_one_head_stays_there(merger: Merger) -> None:
    held = held_by(merger, rows())
    keep = kept_of(held)
    expected = asked(merger, held, keep)
    values = held.values.clone()
    values[0, 0, 5] = float("nan")
    found = asked(merger, replace(held, values=values), keep)
    assert same(found[1:], expected[1:])


@every_merger
def test_heads_in_another_order_give_the_same_in_that_order(merger: Merger) -> None:
    order = torch.tensor([2, 0, 1])
    heads = (order[:, None] * GROUP + torch.arange(GROUP)).flatten()
    some = rows()
    turned = [
        replace(row, keys=row.keys[order], values=row.values[order], queries=row.queries[heads], mass=row.mass[order])
        for row in some
    ]
    held = held_by(merger, some)
    keep = kept_of(held)
    expected = asked(merger, held, keep)
    found = asked(merger, held_by(merger, turned, query_order=heads), keep[:, order])
    assert same(found, [expected[row * HEADS + int(head)] for row in range(3) for head in order])


@every_merger
def test_one_token_kept_of_many(merger: Merger) -> None:
    held = held_by(merger, rows())
    last = held.positions == held.seen - 1
    for keys, values, weights in asked(merger, held, last):
        assert keys.shape == (1, SIZE) and torch.isfinite(keys).all() and torch.isfinite(values).all()
        assert torch.isfinite(weights).all()
