"""Erank: ranks of known matrices, shares worked by hand, and what RankKV's own rules lose."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.budget_requests import asked, held_with
from tests.support.held_rows import Row, held_of, make_row

from kvtailor.allocate.erank import Erank
from kvtailor.types import Needs


def naive(row: Row, newest: int) -> float:
    """All probabilities of one row, averaged over query heads, of which the newest rows are taken; LAPACK's values."""
    heads, n, size = row.keys.shape
    keys = row.keys.double().repeat_interleave(row.queries.shape[0] // heads, 0)
    logits = row.queries.double() @ keys.transpose(1, 2) / math.sqrt(size)
    matrix = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1).mean(0)[-newest:]
    values = torch.linalg.svdvals(matrix)
    shares = values[values > 1e-10] / values[values > 1e-10].sum()
    return float(torch.exp(-(shares * shares.log()).sum()))


@pytest.mark.parametrize("newest", [256, 63, 20])
def test_measures_the_mean_matrix_of_each_padded_row(newest: int) -> None:
    generator = torch.Generator().manual_seed(newest)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 5, 1)]
    ranks = Erank(rows=newest).measure(held_of(rows, Needs(window=newest)))
    for rank, row in zip(ranks.tolist(), rows, strict=True):
        assert rank == pytest.approx(naive(row, newest), rel=1e-5)


def rank_of(matrix: list[list[float]]) -> float:
    return float(Erank().measure(held_with(matrix, heads=2)))


def test_measures_what_is_known() -> None:
    n = 6
    itself = [[float(i == j) for j in range(n)] for i in range(n)]
    first = [[float(j == 0) for j in range(n)] for _ in range(n)]
    assert rank_of(itself) == pytest.approx(n, rel=1e-6), "each looks at itself: one token needed, the highest rank"
    assert rank_of(first) == pytest.approx(1.0, rel=1e-6)
    # (1, 0) and (1/2, 1/2): the squares of the singular values have the sum 3/2 and the product 1/4.
    squares = [(1.5 + sign * math.sqrt(1.25)) / 2 for sign in (1, -1)]
    shares = [math.sqrt(square) / sum(map(math.sqrt, squares)) for square in squares]
    known = math.exp(-sum(share * math.log(share) for share in shares))
    assert rank_of([[1.0, 0.0], [0.5, 0.5]]) == pytest.approx(known, rel=1e-6)


def budgets(allocator: Erank, total: int, capacity: list[int], ranks: list[float], floor: int = 0) -> list[int]:
    found = allocator.allocate(asked(total, capacity, floor=floor, measured=ranks))
    return found[0, :, 0].tolist()


def test_proportional_by_hand() -> None:
    # 600 tokens by 100 : 300 : 200.
    assert budgets(Erank(), 600, [9999] * 3, [100.0, 300.0, 200.0]) == [100, 300, 200]
    # 100 by 1 : 1 : 1, and 7 by 2 : 3 : 5: 1.4, 2.1, 3.5, of which the largest remainder gets the seventh.
    assert budgets(Erank(), 100, [9999] * 3, [5.0] * 3) == [34, 33, 33]
    assert budgets(Erank(least=0), 7, [9999] * 3, [2.0, 3.0, 5.0]) == [1, 2, 4]


def test_a_layer_gets_no_more_than_it_holds_and_the_rest_goes_by_rank() -> None:
    # 3000 by 6 : 3 : 1 is 1800, 900, 300; the first layer holds 1500, and its 300 go 3 : 1.
    assert budgets(Erank(), 3000, [1500] * 3, [6.0, 3.0, 1.0]) == [1500, 1125, 375]
    assert budgets(Erank(), 9000, [1500] * 3, [6.0, 3.0, 1.0]) == [1500] * 3


def test_least_comes_out_of_the_budget_and_gives_way_to_it() -> None:
    # 100 by 97 : 2 : 1 with 4 for each at least: 92, 4, 4. With 32 at least, 36 are left for the first.
    ranks = [97.0, 2.0, 1.0]
    assert budgets(Erank(), 100, [500] * 3, ranks) == [92, 4, 4]
    assert budgets(Erank(least=32), 100, [500] * 3, ranks) == [36, 32, 32]
    # 60 tokens cannot give 32 to each of three: 20 each, and nothing is left.
    assert budgets(Erank(least=32), 60, [500] * 3, ranks) == [20, 20, 20]
    # What must stay comes first: 10 each; then 4 of the 34 go to the first.
    assert budgets(Erank(), 34, [500] * 3, ranks, floor=10) == [14, 10, 10]
    assert budgets(Erank(least=12), 34, [500] * 3, ranks, floor=10) == [12, 11, 11]
    assert budgets(Erank(least=32), 100, [500, 5, 500], ranks) == [63, 5, 32]


def test_heads_of_a_layer_get_the_same() -> None:
    found = Erank().allocate(asked(3 * 600 + 2, [9999] * 3, heads=3, measured=[100.0, 300.0, 200.0]))
    assert found[0].tolist() == [[100] * 3, [300] * 3, [200] * 3]


def weights(allocator: Erank, ranks: list[float]) -> list[float]:
    return allocator.weights(torch.tensor([ranks]))[0].tolist()


def test_weightings_by_hand() -> None:
    ranks = [10.0, 20.0, 40.0, 80.0]
    assert weights(Erank(), ranks) == ranks
    assert weights(Erank(weighting="power"), ranks) == [100.0, 400.0, 1600.0, 6400.0]
    assert weights(Erank(weighting="power", exponent=0.5), [9.0, 16.0]) == [3.0, 4.0]
    # The percentiles 25 and 75 of four ranks lie at 17.5 and 50.
    assert weights(Erank(weighting="adaptive"), ranks) == [0.5, 1.0, 1.0, 1.5]
    assert weights(Erank(weighting="adaptive"), [7.0] * 4) == [1.0] * 4
    halves = weights(Erank(weighting="softmax", temperature=10 / math.log(2)), [10.0, 20.0, 30.0])
    assert halves == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert budgets(Erank(weighting="softmax", temperature=1e-3, least=0), 9, [5] * 3, [1.0, 2.0, 3.0]) == [2, 2, 5]


def test_ranks_are_asked_of_every_layer() -> None:
    with pytest.raises(ValueError, match="layers 0 to 2 at once, found \\(0, 1\\); its scope is 'prompt'"):
        Erank().allocate(asked(9, [9, 9], layers=3, measured=[1.0, 2.0]))
    with pytest.raises(ValueError, match="no measurements"):
        Erank().allocate(asked(9, [9, 9]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": 1}, "rows"),
        ({"weighting": "log"}, "weighting"),
        ({"temperature": 0.0}, "temperature"),
        ({"exponent": -1.0}, "exponent"),
        ({"least": -1}, "least"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_refuses_wrong_settings(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^erank: {said} must"):
        Erank(**wrong)  # type: ignore[arg-type]


def test_calibrated_ranks_are_shared_out_as_measured_ones() -> None:
    capacity, ranks = [40, 90, 90, 90], [3.0, 9.0, 1.5, 4.5]
    for weighting in ("proportional", "softmax", "power", "adaptive"):
        static, dynamic = (Erank(static=each, weighting=weighting, least=0) for each in (True, False))
        request = replace(asked(160, capacity, heads=2), calibration={"erank": torch.tensor(ranks)})
        expected = dynamic.allocate(asked(160, capacity, heads=2, measured=ranks))
        assert torch.equal(static.allocate(request), expected)
    assert static.needs == Needs() and static.measure(held_with([[1.0]])) is None
    assert not dynamic.wants_calibration and dynamic.content_hash is None


def test_a_file_without_static_and_a_layer_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="write static=true too"):
        Erank(file="ranks.safetensors")
    with pytest.raises(ValueError, match="needs calibrated ranks and all layers"):
        Erank(static=True).allocate(asked(10, [9, 9]))
