"""Inverse and shuffled: the layers' budgets stay, only who gets them changes."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from tests.contract.test_allocate import KINDS, bounds, fitting, measured_by, scores_for, text_of
from tests.support.discover import samples_of
from tests.support.held_rows import example_tensors, held_of, make_row
from tests.support.seam.zoo import build, prompts
from torch import Tensor

import kvtailor
from kvtailor.allocate.adakv import AdaKV
from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.allocate.inverse import Inverse
from kvtailor.allocate.pyramid import Pyramid
from kvtailor.allocate.shuffled import Shuffled
from kvtailor.allocate.uniform import Uniform
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import parse
from kvtailor.types import Held, Needs

INNER = [each for kind in KINDS for each in samples_of(kind)]
every_inner = pytest.mark.parametrize("inner", INNER, ids=text_of)
every_mover = pytest.mark.parametrize("mover", [Inverse, Shuffled], ids=lambda kind: kind.__name__)


@dataclass(frozen=True, kw_only=True)
class Given(Allocator):
    """Budgets that a test wrote down, (b, l, h) as nested tuples."""

    budgets: tuple[tuple[tuple[int, ...], ...], ...]
    even: bool = False

    @property
    def even_heads(self) -> bool:
        return self.even

    @property
    def needs(self) -> Needs:
        return Needs(window=7)

    def measure(self, held: Held) -> Tensor | None:
        return held.keys.sum()

    def allocate(self, request: BudgetRequest) -> Tensor:
        return torch.tensor(self.budgets)


def request_of(capacity: Tensor, floor: Tensor, total: Tensor, scores: list[Tensor] | None = None) -> BudgetRequest:
    layers = capacity.shape[1]
    return BudgetRequest(
        total=total, capacity=capacity, floor=floor, layers=tuple(range(layers)), num_layers=layers, scores=scores
    )


def wide(budgets: Tensor) -> BudgetRequest:
    """Bounds that no budget meets."""
    return request_of(torch.full_like(budgets, 10**6), torch.zeros_like(budgets), budgets.sum((1, 2)))


def given(budgets: Tensor, *, even: bool = False) -> Given:
    return Given(budgets=tuple(tuple(map(tuple, row)) for row in budgets.tolist()), even=even)


def asked(inner: Allocator, seed: int) -> BudgetRequest:
    """Alike heads and layers, half of what there is, and recent tokens."""
    shape = fitting(inner, (3, 6, 4))
    capacity, floor = bounds(shape, 63, 4, seed, equal=True)
    scores = scores_for(capacity, floor, seed) if inner.needs_scores else None
    request = request_of(capacity, floor, capacity.sum((1, 2)) // 2, scores)
    calibration = example_tensors(inner, layers=shape[1], heads=shape[2], group=2, size=4)
    measured = measured_by(inner, tuple(range(shape[0])), *shape[1:])
    return replace(request, measured=measured, calibration=calibration)


def naive_inverse(layers: list[list[int]]) -> list[list[int]]:
    """One row: sorted pairs, read from both ends."""
    ranked = sorted(range(len(layers)), key=lambda i: (-sum(layers[i]), i))
    found: list[list[int]] = [[] for _ in layers]
    for place, layer in enumerate(ranked):
        found[layer] = layers[ranked[-1 - place]]
    return found


@pytest.mark.parametrize("layers", [1, 2, 3, 8, 63])
def test_inverse_is_that_of_a_sorted_list(layers: int) -> None:
    for seed in range(20):
        most = 4 if seed % 2 else 900  # with ties and without
        budgets = torch.randint(0, most, (3, layers, 3), generator=torch.Generator().manual_seed(seed))
        found = Inverse(of=given(budgets)).allocate(wide(budgets))
        assert found.tolist() == [naive_inverse(row) for row in budgets.tolist()]


def test_inverse_by_hand() -> None:
    # Layer sums 9, 3, 5, 1: the layers of 9 and 1 change places, and those of 5 and 3.
    budgets = torch.tensor([[[4, 5], [0, 3], [5, 0], [1, 0]]])
    assert Inverse(of=given(budgets)).allocate(wide(budgets)).tolist() == [[[1, 0], [5, 0], [0, 3], [4, 5]]]


def test_what_a_layer_cannot_hold_goes_to_the_others_by_their_budgets() -> None:
    # The second layer should get 12 and holds 8: the 4 left go 3 : 1 to layers that should get 6 and 2.
    budgets = torch.tensor([[[12], [2], [6]]])
    request = request_of(torch.tensor([[[50], [8], [50]]]), torch.zeros(1, 3, 1, dtype=torch.int64), torch.tensor([20]))
    assert Inverse(of=given(budgets)).allocate(request).tolist() == [[[3], [8], [9]]]
    # A layer that must keep 5 of what should be 2 takes 3 from 12 and 6, two from the larger.
    request = request_of(torch.full((1, 3, 1), 50), torch.tensor([[[5], [0], [0]]]), torch.tensor([20]))
    assert Inverse(of=given(budgets)).allocate(request).tolist() == [[[5], [10], [5]]]


@every_mover
@every_inner
def test_the_budgets_of_the_layers_stay_and_their_heads_go_along(mover: type, inner: Allocator) -> None:
    for seed in range(4):
        request = asked(inner, seed)
        before, after = inner.allocate(request), mover(of=inner).allocate(request)
        assert torch.equal(before.sum((1, 2)), after.sum((1, 2)))
        for one, other in zip(before.tolist(), after.tolist(), strict=True):
            assert Counter(map(tuple, one)) == Counter(map(tuple, other))


@every_inner
def test_the_inverse_of_an_inverse_is_the_allocator(inner: Allocator) -> None:
    for seed in range(3):
        request = asked(inner, seed)
        once = inner.allocate(request)
        assert torch.equal(Inverse(of=Inverse(of=inner)).allocate(request), once)
        # The same by arithmetic alone, for rows whose layers differ: with ties no rule could bring all of them back.
        back = Inverse(of=given(Inverse(of=inner).allocate(request), even=inner.even_heads)).allocate(request)
        for row, sums in enumerate(once.sum(-1).tolist()):
            if len(set(sums)) == len(sums):
                assert torch.equal(back[row], once[row])


@every_mover
def test_ragged_bounds_cut_and_sums_stay(mover: type) -> None:
    for inner in (Pyramid(), AdaKV(), Uniform()):
        for seed in range(5):
            capacity, floor = bounds((3, 5, 3), 40, 6, seed, equal=False)
            scores = scores_for(capacity, floor, seed) if inner.needs_scores else None
            request = request_of(capacity, floor, capacity.sum((1, 2)) * 2 // 3, scores)
            found = mover(of=inner).allocate(request)
            assert torch.equal(found.sum((1, 2)), inner.allocate(request).sum((1, 2)))
            assert (found >= floor).all() and (found <= capacity).all()


def test_shuffled_is_the_order_of_digests_and_the_same_everywhere() -> None:
    for layers in (1, 2, 5, 24, 63):
        for state in (0, 1, -3):
            digests = [hashlib.sha256(f"{state} {layer}".encode()).hexdigest() for layer in range(layers)]
            source = Shuffled(of=Uniform(), state=state).order(layers)
            assert [digests[layer] for layer in source] == sorted(digests)
    # From coreutils: for i in 0 1 2 3 4 5; do echo "$(printf "0 $i" | sha256sum) $i"; done | sort
    assert Shuffled(of=Uniform()).order(6) == [4, 2, 1, 5, 0, 3]
    budgets = torch.arange(12).view(1, 6, 2)
    assert torch.equal(Shuffled(of=given(budgets)).allocate(wide(budgets))[0], budgets[0, [4, 2, 1, 5, 0, 3]])


def test_states_are_many_orders_and_every_layer_may_get_any_budget() -> None:
    orders = [tuple(Shuffled(of=Uniform(), state=state).order(8)) for state in range(400)]
    assert len(set(orders)) > 390
    for layer in range(8):
        got = Counter(order[layer] for order in orders)
        # 50 on average, standard deviation 6.6.
        assert all(20 < got[source] < 80 for source in range(8))


@every_mover
def test_what_the_inner_allocator_wants_is_asked_for(mover: type) -> None:
    inner = given(torch.zeros(1, 2, 1, dtype=torch.int64), even=True)
    outer = mover(of=inner)
    assert outer.needs == Needs(window=7) and outer.even_heads and not outer.needs_scores and outer.scope == "prompt"
    held = held_of([make_row(9, heads=2, group=2, size=4, generator=torch.Generator().manual_seed(0))], outer.needs)
    assert outer.measure(held) == held.keys.sum() and mover(of=Uniform()).measure(held) is None
    assert mover(of=AdaKV()).needs_scores and not mover(of=AdaKV()).even_heads
    sizes = {"tokens": 9, "heads": 2, "group": 2, "size": 8}
    assert outer.flops(**sizes) is None and mover(of=Pyramid()).flops(**sizes) == 0


@every_mover
def test_an_absent_layer_is_refused(mover: type) -> None:
    request = BudgetRequest(
        total=torch.tensor([9]),
        capacity=torch.full((1, 1, 1), 9),
        floor=torch.zeros(1, 1, 1),
        layers=(1,),
        num_layers=3,
    )
    with pytest.raises(ValueError, match=rf"^{mover.__name__.lower()} needs all 3 layers at once, found \(1,\)"):
        mover(of=Uniform()).allocate(request)


def test_a_cache_holds_the_inverted_pyramid() -> None:
    model = build("llama")
    ids, mask = prompts((60, 41))
    held = {}
    for name in ("pyramid", "inverse(of=pyramid)", "shuffled(of=pyramid, state=1)"):
        cache = kvtailor.cache_for(model, parse(f"snapkv(window=4, kernel=3) + {name} @ tokens=16"))
        with torch.no_grad():
            model(ids, attention_mask=mask, **hand_cache(cache))
        held[name] = cache.held().sum(-1)
    assert torch.equal(held["inverse(of=pyramid)"], held["pyramid"].flip(1))
    assert (held["pyramid"][:, 0] > held["pyramid"][:, -1]).all()
    order = Shuffled(of=Pyramid(), state=1).order(3)
    assert order != [0, 1, 2]
    assert torch.equal(held["shuffled(of=pyramid, state=1)"], held["pyramid"][:, order])
