"""What the stage `allocate` promises, tested on every method in its folder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tests.support.crossed import crossed
from tests.support.discover import methods_of, samples_of
from tests.support.held_rows import example_tensors, held_of, make_row
from torch import Tensor

import kvtailor.allocate
from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.plan.arguments import word_of


def text_of(allocator: Allocator) -> str:
    return str(word_of(allocator))


KINDS = methods_of(kvtailor.allocate, Allocator)
ALLOCATORS = [allocator for kind in KINDS for allocator in samples_of(kind)]
every_allocator = pytest.mark.parametrize("allocator", ALLOCATORS, ids=text_of)
LAYERED = [allocator for allocator in ALLOCATORS if allocator.scope == "layer"]
every_layered = pytest.mark.parametrize("allocator", LAYERED, ids=text_of)
SHAPES = [(1, 1, 1), (3, 5, 3), (2, 4, 1), (1, 2, 7)]


def bounds(shape: tuple[int, int, int], most: int, recent: int, seed: int, equal: bool) -> tuple[Tensor, Tensor]:
    """Capacities (b, l, h), ragged or equal within a row, and their floors."""
    generator = torch.Generator().manual_seed(seed)
    rows = shape[0]
    drawn = torch.randint(1, most + 1, (rows, 1, 1) if equal else shape, generator=generator).expand(shape).clone()
    return drawn, drawn.clamp(max=recent)


def fitting(allocator: Allocator, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape (b, l, h), or the nearest of a model that the allocator was made for."""
    sizes = itertools.product([shape[1], *range(1, 9)], [shape[2], *range(1, 9)])
    layers, heads = next(s for s in sizes if allocator.misfit(layers=s[0], heads=s[1], size=8) is None)
    return shape[0], layers, heads


def scores_for(capacity: Tensor, floor: Tensor, seed: int, ties: bool = False) -> list[Tensor]:
    """For each layer (b, h, n): one score per token, +inf for the newest `floor`, -inf where there is none."""
    generator = torch.Generator().manual_seed(seed)
    rows, layers, heads = capacity.shape
    made = []
    for i in range(layers):
        n = int(capacity[:, i].max()) + 2
        scores = torch.rand(rows, heads, n, generator=generator) * torch.rand(rows, heads, 1, generator=generator)
        if ties:
            scores = (scores * 4).round()
        column = torch.arange(n)
        held, sure = capacity[:, i, :, None], floor[:, i, :, None]
        scores = scores.masked_fill(column >= held - sure, torch.inf).masked_fill(column >= held, -torch.inf)
        made.append(scores)
    return made


@cache
def measured_by(allocator: Allocator, rows: tuple[int, ...], layers: int, heads: int) -> tuple[Tensor, ...] | None:
    """What it measures of random layers, other ones for each number in `rows`; None if it measures nothing."""
    found = []
    for layer in range(layers):
        generators = [torch.Generator().manual_seed(100 * row + layer) for row in rows]
        made = [make_row(20, heads=heads, group=2, size=4, generator=generator) for generator in generators]
        found.append(allocator.measure(held_of(made, allocator.needs, layer=layer, layers=layers)))
    return None if found[0] is None else tuple(each for each in found if each is not None)


def ask(
    allocator: Allocator,
    total: Tensor,
    capacity: Tensor,
    floor: Tensor,
    scores: list[Tensor],
    *,
    rows: Sequence[int] | None = None,
    layers: int | None = None,
) -> Tensor:
    """All present layers at once, of `layers` in all; `rows`: which rows these are."""
    count, present, heads = capacity.shape
    measured = measured_by(allocator, tuple(range(count) if rows is None else rows), present, heads)
    return allocator.allocate(
        BudgetRequest(
            total=total,
            capacity=capacity,
            floor=floor,
            layers=tuple(range(present)),
            num_layers=present if layers is None else layers,
            scores=scores if allocator.needs_scores else None,
            measured=measured,
            calibration=example_tensors(allocator, layers=layers or present, heads=heads, group=2, size=4),
        )
    )


def ask_one_by_one(
    allocator: Allocator,
    total: Tensor,
    capacity: Tensor,
    floor: Tensor,
    scores: list[Tensor],
    row_tokens: Tensor | None = None,
) -> Tensor:
    """Each layer alone, as an eviction of scope "layer" asks."""
    layers = capacity.shape[1]
    parts = []
    for i in range(layers):
        one = BudgetRequest(
            total=total,
            capacity=capacity[:, i : i + 1],
            floor=floor[:, i : i + 1],
            layers=(i,),
            num_layers=layers,
            scores=[scores[i]] if allocator.needs_scores else None,
            row_tokens=row_tokens,
            calibration=example_tensors(allocator, layers=layers, heads=capacity.shape[2], group=2, size=4),
        )
        parts.append(allocator.allocate(one))
    return torch.cat(parts, 1)


def totals(capacity: Tensor, floor: Tensor) -> list[Tensor]:
    """Nothing, less than the floors, ordinary sizes, just everything, and more than there is."""
    low, high = floor.sum((1, 2)), capacity.sum((1, 2))
    between = [low + ((high - low) * part).long() for part in (0.1, 0.37, 0.5, 0.93)]
    return [torch.zeros_like(low), torch.ones_like(low), low - 1, low, *between, high - 1, high, high + 1, high * 3]


def at_once(
    capacity: Tensor, floor: Tensor, scores: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[int]]:
    """The same rows once for each of `totals`, as rows of one request: totals, bounds, scores, which row each is."""
    each = totals(capacity, floor)
    bounds = (bound.repeat(len(each), 1, 1) for bound in (capacity, floor))
    repeated = [score.repeat(len(each), 1, 1) for score in scores]
    return torch.cat(each), *bounds, repeated, list(range(len(capacity))) * len(each)


def owed(allocator: Allocator, total: Tensor, capacity: Tensor, floor: Tensor) -> Tensor:
    """(b,) what the budgets must sum to."""
    heads = capacity.shape[-1]
    if allocator.even_heads:
        total = torch.where(rows_of_like_heads(capacity, floor), total // heads * heads, total)
    return total.clamp(floor.sum((1, 2)), capacity.sum((1, 2)))


def rows_of_like_heads(capacity: Tensor, floor: Tensor) -> Tensor:
    """(b,) bool: in every layer, all heads have the same bounds."""
    return ((capacity == capacity[..., :1]) & (floor == floor[..., :1])).all(-1).all(-1)


def test_the_folder_holds_methods() -> None:
    assert {"Uniform", "AdaKV", "Pyramid", "Pooled"} <= {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_is_a_frozen_keyword_only_dataclass_that_can_be_made(kind: type[Allocator]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    for one, other in zip(samples_of(kind), samples_of(kind), strict=True):
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.anything = 1
        assert one == other and hash(one) == hash(other)
        assert one.scope in ("layer", "prompt", "progressive")


# Five that follow each other have every shape, both sizes, and ragged and equal heads.
BOUNDS = [(SHAPES[i % 4], (1, 63)[(i + i // 4) % 2], (i + i // 8) % 2 == 0) for i in range(16)]


@pytest.mark.parametrize(
    ("allocator", "asked"),
    crossed(ALLOCATORS, BOUNDS, each=5),
    ids=lambda x: str(x if isinstance(x, tuple) else text_of(x)),
)
def test_sums_exactly_between_floor_and_capacity(
    allocator: Allocator, asked: tuple[tuple[int, int, int], int, bool]
) -> None:
    shape, most, equal = asked
    shape = fitting(allocator, shape)
    for seed, recent in ((0, 0), (1, 8), (2, 500)):
        capacity, floor = bounds(shape, most, recent, seed, equal)
        scores = scores_for(capacity, floor, seed, ties=seed == 1)
        total, capacity, floor, scores, rows = at_once(capacity, floor, scores)
        budgets = ask(allocator, total, capacity, floor, scores, rows=rows)
        assert budgets.shape == (len(rows), *shape[1:])
        assert budgets.dtype == torch.int64 and budgets.device.type == "cpu"
        assert (budgets >= floor).all() and (budgets <= capacity).all()
        assert torch.equal(budgets.sum((1, 2)), owed(allocator, total, capacity, floor))


@every_allocator
def test_like_heads_get_the_same_if_it_says_so(allocator: Allocator) -> None:
    capacity, floor = bounds(fitting(allocator, (3, 5, 3)), 63, 8, 9, equal=True)
    total, capacity, floor, scores, rows = at_once(capacity, floor, scores_for(capacity, floor, 9))
    budgets = ask(allocator, total, capacity, floor, scores, rows=rows)
    assert bool((budgets == budgets[..., :1]).all()) == allocator.even_heads


@every_layered
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_asked_one_by_one_sum_exactly(allocator: Allocator, shape: tuple[int, int, int]) -> None:
    shape = fitting(allocator, shape)
    for seed, recent in ((3, 0), (4, 8)):
        capacity, floor = bounds(shape, 63, recent, seed, equal=True)
        total, capacity, floor, scores, rows = at_once(capacity, floor, scores_for(capacity, floor, seed))
        budgets = ask_one_by_one(allocator, total, capacity, floor, scores)
        assert (budgets >= floor).all() and (budgets <= capacity).all()
        assert torch.equal(budgets.sum((1, 2)), owed(allocator, total, capacity, floor))
        assert torch.equal(budgets, ask(allocator, total, capacity, floor, scores, rows=rows))


@every_layered
def test_a_second_walk_holds_no_more_than_the_first(allocator: Allocator) -> None:
    prompt = torch.tensor([120, 200])
    capacity = prompt[:, None, None].expand(fitting(allocator, (2, 6, 3)))
    floor = torch.full_like(capacity, 8)
    total = (capacity.sum((1, 2)) * 0.3).long()
    budgets = ask_one_by_one(allocator, total, capacity, floor, scores_for(capacity, floor, 5), prompt)
    for eviction in range(1, 4):
        grown = budgets + 16
        scores = scores_for(grown, floor, eviction)
        budgets = ask_one_by_one(allocator, total, grown, floor, scores, prompt + 16 * eviction)
        assert torch.equal(budgets.sum((1, 2)), owed(allocator, total, capacity, floor))


@every_allocator
def test_more_total_never_gives_less(allocator: Allocator) -> None:
    capacity, floor = bounds(fitting(allocator, (2, 4, 3)), 30, 4, 6, equal=False)
    scores = scores_for(capacity, floor, 6)
    total = torch.arange(0, int(capacity.sum()) + 3, 11).repeat_interleave(2)
    many = len(total) // 2
    bounds_of_all = (bound.repeat(many, 1, 1) for bound in (capacity, floor))
    repeated = [score.repeat(many, 1, 1) for score in scores]
    sums = ask(allocator, total, *bounds_of_all, repeated, rows=[0, 1] * many).sum((1, 2)).view(many, 2)
    assert bool((sums[1:] >= sums[:-1]).all()) and many > 12


@every_allocator
def test_rows_do_not_hear_of_each_other(allocator: Allocator) -> None:
    capacity, floor = bounds(fitting(allocator, (3, 4, 3)), 63, 8, 7, equal=False)
    scores = scores_for(capacity, floor, 7)
    total = torch.tensor([100, 350, 8])
    together = ask(allocator, total, capacity, floor, scores)
    for i in range(3):
        row = slice(i, i + 1)
        alone = ask(allocator, total[row], capacity[row], floor[row], [each[row] for each in scores], rows=[i])
        assert torch.equal(together[row], alone)


@every_allocator
def test_changes_no_input(allocator: Allocator) -> None:
    capacity, floor = bounds(fitting(allocator, (2, 3, 2)), 63, 8, 8, equal=False)
    scores = scores_for(capacity, floor, 8)
    total = torch.tensor([90, 200])
    inputs = [total, capacity, floor, *scores]
    before = [each.clone() for each in inputs]
    ask(allocator, total, capacity, floor, scores).fill_(-1)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@pytest.mark.parametrize("allocator", [allocator for allocator in ALLOCATORS if allocator.needs_scores], ids=text_of)
def test_asks_for_the_scores_it_needs(allocator: Allocator) -> None:
    capacity, floor = bounds(fitting(allocator, (1, 2, 2)), 9, 1, 0, equal=True)
    present = tuple(range(floor.shape[1]))
    request = BudgetRequest(
        total=torch.tensor([9]), capacity=capacity, floor=floor, layers=present, num_layers=len(present)
    )
    with pytest.raises(ValueError, match="scores"):
        allocator.allocate(request)
