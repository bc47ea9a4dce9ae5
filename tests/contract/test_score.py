"""What the stage `score` promises, tested on every method in its folder."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tests.support.discover import methods_of, sample_of
from tests.support.held_rows import Row, held_by, make_row, with_holes
from tests.support.naming import named

import kvtailor.score
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

SCORERS = methods_of(kvtailor.score, Scorer)
every_scorer = pytest.mark.parametrize("kind", SCORERS, ids=lambda kind: kind.__name__)
LENGTHS = (63, 40, 5)
# What is too large for rows of 63 tokens, so that all of a method is asked.
SMALL = {
    "LagKV": {"sinks": 2, "lag": 8},
    "NonCausal": {"chunk": 8, "rows": 20},
    "Compactor": {"chunk": 8, "sketch": 3},
    "LazyEviction": {"threshold": 0.02},
}


def small(kind: type[Scorer]) -> Scorer:
    return dataclasses.replace(sample_of(kind), **SMALL.get(kind.__name__, {}))


def rows_of(lengths: tuple[int, ...], seed: int = 0, heads: int = 3) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [make_row(n, heads=heads, group=2, size=7, generator=generator) for n in lengths]


def tensors_of(held: Held) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(held, field.name) for field in dataclasses.fields(held)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def test_the_folder_holds_methods() -> None:
    assert {"Position", "SnapKV", "H2O", "Random"} <= {kind.__name__ for kind in SCORERS}


@every_scorer
def test_is_a_frozen_keyword_only_dataclass_with_defaults(kind: type[Scorer]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    scorer = sample_of(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scorer.anything = 1  # type: ignore[attr-defined]
    assert scorer == sample_of(kind) and hash(scorer) == hash(sample_of(kind))
    assert scorer.scope in ("layer", "prompt")
    assert scorer.slack is None or scorer.slack >= 1
    assert scorer.recent >= 0 and scorer.recent >= scorer.needs.window


EVERY = list(
    itertools.product([(63,), LENGTHS, (1,), (1, 2, 1), (33, 31)], [torch.float32, torch.bfloat16, torch.float16])
)


@every_scorer
def test_gives_one_finite_number_for_each_token(kind: type[Scorer]) -> None:
    for lengths, dtype in EVERY:
        with named(lengths, dtype):
            scorer = small(kind)
            held = held_by(scorer, rows_of(lengths), dtype=dtype)
            scores = scorer.score(held)
            assert scores.shape == held.positions.shape
            assert scores.dtype == torch.float32
            assert scores[held.valid].isfinite().all()


@every_scorer
def test_changes_no_input_and_shares_no_memory_with_one(kind: type[Scorer]) -> None:
    scorer = small(kind)
    held = held_by(scorer, rows_of(LENGTHS))
    before = {name: tensor.clone() for name, tensor in tensors_of(held).items()}
    scorer.score(held).fill_(-1.0)
    for name, tensor in tensors_of(held).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


@every_scorer
def test_remembers_nothing_between_calls(kind: type[Scorer]) -> None:
    scorer = small(kind)
    held = held_by(scorer, rows_of(LENGTHS))
    once = scorer.score(held)
    scorer.score(held_by(scorer, rows_of((17, 50), seed=9), layer=2))
    again = scorer.score(held)
    assert torch.equal(once[held.valid], again[held.valid])


@every_scorer
def test_a_padded_row_scores_as_it_does_alone(kind: type[Scorer]) -> None:
    scorer = small(kind)
    rows = rows_of(LENGTHS)
    batch = scorer.score(held_by(scorer, rows))
    for i, row in enumerate(rows):
        alone = scorer.score(held_by(scorer, [row]))[0]
        # A score may be a sum whose terms cancel, so it is as exact as the largest of its row.
        rounded = 16 * torch.finfo(torch.float32).eps * float(alone[alone.isfinite()].abs().max())
        torch.testing.assert_close(batch[i, :, max(LENGTHS) - row.tokens :], alone, rtol=1e-5, atol=rounded)


@every_scorer
def test_a_row_does_not_hear_of_its_neighbours(kind: type[Scorer]) -> None:
    scorer = small(kind)
    mine, others = rows_of((40,), seed=1), rows_of((40, 63), seed=2)
    one = scorer.score(held_by(scorer, [mine[0], others[1]]))
    two = scorer.score(held_by(scorer, [mine[0], rows_of((63,), seed=5)[0]]))
    torch.testing.assert_close(one[0, :, 23:], two[0, :, 23:], rtol=0, atol=0)


@every_scorer
def test_filler_between_tokens_changes_nothing(kind: type[Scorer]) -> None:
    scorer = small(kind)
    held = held_by(scorer, rows_of(LENGTHS))
    holed, where = with_holes(held, 11, torch.Generator().manual_seed(3))
    expected, got = scorer.score(held), scorer.score(holed).gather(2, where)
    torch.testing.assert_close(got[held.valid], expected[held.valid], rtol=1e-5, atol=1e-7)


@every_scorer
def test_heads_that_change_places_take_their_scores_along(kind: type[Scorer]) -> None:
    scorer = small(kind)
    rows = rows_of(LENGTHS)
    order, group = torch.tensor([2, 0, 1]), 2
    query_order = (order[:, None] * group + torch.arange(group)).flatten()
    moved = [
        Row(
            queries=r.queries[query_order],
            **{f.name: getattr(r, f.name)[order] for f in dataclasses.fields(r) if f.name != "queries"},
        )
        for r in rows
    ]
    held = held_by(scorer, rows)
    expected = scorer.score(held)[:, order]
    got = scorer.score(held_by(scorer, moved, query_order=query_order, head_order=order))
    valid = held.valid[:, order]
    if scorer.heads_alike:
        torch.testing.assert_close(got[valid], expected[valid], rtol=1e-5, atol=1e-7)
    else:
        assert not torch.equal(got[valid], expected[valid]), "heads_alike = False is declared but not true"


@every_scorer
def test_divided_by_its_scale_it_is_a_probability(kind: type[Scorer]) -> None:
    """A scorer that says a scale says one for each row, the row's own; no score goes above 1 but those it lifts."""
    scorer = small(kind)
    for lengths in (LENGTHS, (1,), (33, 31)):
        held = held_by(scorer, rows_of(lengths))
        if scorer.needs.mass:
            # As if all queries of both heads of the group had looked at every token alike.
            real = (held.seen - held.first)[:, None, None]
            held = dataclasses.replace(held, mass=torch.ones_like(held.mass) * 2 * real)
        scale = scorer.attention_scale(held, group=2)
        if scale is None:
            return
        assert scale.shape == (len(lengths),) and scale.dtype == torch.float32 and bool((scale > 0).all())
        for row, tokens in zip(rows_of(lengths), scale, strict=True):
            alone = scorer.attention_scale(held_by(scorer, [row]), group=2)
            assert alone is not None and float(alone) == float(tokens)
        shares = scorer.score(held) / scale[:, None, None]
        lifted = held.positions < held.first[:, None, None] + getattr(scorer, "sinks", 0)
        came_after = held.reconstruction < 0 if held.reconstruction is not None else torch.zeros_like(lifted)
        weighed = shares[held.valid & ~lifted & ~came_after]
        assert bool((weighed <= 1 + 1e-5).all()) and bool((weighed >= 0).all())


def test_the_scores_that_are_attention_say_so() -> None:
    said = set()
    for scorer in map(small, SCORERS):
        scale = scorer.attention_scale(held_by(scorer, rows_of((40,))), group=2)
        said |= set() if scale is None else {type(scorer).__name__}
    assert said == {"H2O", "KVzip", "RMS", "SnapKV", "TOVA"}


@every_scorer
def test_what_is_the_same_on_all_layers_follows_from_the_columns_alone(kind: type[Scorer]) -> None:
    """Other keys, values and queries at the same columns, and another layer: the same scores of the same tokens."""
    scorer = small(kind)
    one, other = (held_by(scorer, rows_of(LENGTHS, seed=seed)) for seed in (1, 2))
    other = dataclasses.replace(other, layer=one.layer + 1)
    same = torch.equal(scorer.score(one)[one.valid], scorer.score(other)[other.valid])
    assert same or not scorer.same_on_layers
