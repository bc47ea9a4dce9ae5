"""AdaKV and Pooled against loops over sorted lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtailor.allocate.adakv import AdaKV
from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.pooled import Pooled


def naive_pool(lanes: list[list[float]], recent: list[int], total: int, floor: float) -> list[int]:
    """Each lane's recent window, then equal turns until the floor is spent, then the best of the rest, one by one."""
    lanes = [sorted((x for x in lane if x > -torch.inf), reverse=True) for lane in lanes]
    counts = list(recent)
    total = min(max(total, sum(counts)), sum(len(lane) for lane in lanes))
    sure = int((total - sum(counts)) * floor)
    extra = [0] * len(lanes)
    while sure:
        open_lanes = [i for i, lane in enumerate(lanes) if counts[i] + extra[i] < len(lane)]
        turn = min(open_lanes, key=lambda i: (extra[i], i))
        extra[turn] += 1
        sure -= 1
    counts = [c + e for c, e in zip(counts, extra, strict=True)]
    while sum(counts) < total:
        rest = [(-lane[counts[i]], i) for i, lane in enumerate(lanes) if counts[i] < len(lane)]
        counts[min(rest)[1]] += 1
    return counts


def make(rows: int, layers: int, heads: int, seed: int, coarse: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    capacity = torch.randint(1, 40, (rows, layers, heads), generator=generator)
    floor = capacity.clamp(max=5)
    scores = []
    for i in range(layers):
        n = int(capacity[:, i].max())
        lane = torch.rand(rows, heads, n, generator=generator) * torch.rand(rows, heads, 1, generator=generator)
        lane = (lane * 5).round() if coarse else lane
        column = torch.arange(n)
        lane = lane.masked_fill(column >= (capacity - floor)[:, i, :, None], torch.inf)
        scores.append(lane.masked_fill(column >= capacity[:, i, :, None], -torch.inf))
    return capacity, floor, scores


@pytest.mark.parametrize("coarse", [True, False], ids=["ties", "distinct"])
@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
def test_adakv_equals_the_loops(floor: float, coarse: bool) -> None:
    for seed in range(5):
        capacity, recent, scores = make(2, 1, 3, seed, coarse)
        for total in (0, 15, 30, 45, 60, 999):
            request = BudgetRequest(
                total=torch.tensor([total, total]),
                capacity=capacity,
                floor=recent,
                layers=(0,),
                num_layers=1,
                scores=scores,
            )
            got = AdaKV(floor=floor).allocate(request)
            for row in range(2):
                expected = naive_pool(scores[0][row].tolist(), recent[row, 0].tolist(), total, floor)
                assert got[row, 0].tolist() == expected


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_pooled_equals_the_loops(floor: float) -> None:
    for seed in range(5):
        capacity, recent, scores = make(2, 3, 2, seed, coarse=seed % 2 == 0)
        for total in (0, 40, 80, 999):
            request = BudgetRequest(
                total=torch.tensor([total, total]),
                capacity=capacity,
                floor=recent,
                layers=(0, 1, 2),
                num_layers=3,
                scores=scores,
            )
            got = Pooled(floor=floor).allocate(request)
            for row in range(2):
                lanes = [lane for layer in scores for lane in layer[row].tolist()]
                assert got[row].flatten().tolist() == naive_pool(lanes, recent[row].flatten().tolist(), total, floor)


def test_adakv_worked_by_hand() -> None:
    # Ten tokens over two heads. Head 0 outscores head 1 everywhere; its share of the floor of 0.2 keeps head 1 alive.
    scores = torch.stack([torch.arange(20, 40).float(), torch.arange(0, 20).float()])[None]
    capacity = torch.full((1, 1, 2), 20)

    def ask(floor: float, recent: int) -> list[int]:
        marked = scores.clone()
        marked[..., 20 - recent :] = torch.inf
        request = BudgetRequest(
            total=torch.tensor([10]),
            capacity=capacity,
            floor=torch.full((1, 1, 2), recent),
            layers=(0,),
            num_layers=1,
            scores=[marked],
        )
        return list(AdaKV(floor=floor).allocate(request)[0, 0].tolist())

    assert ask(0.0, 0) == [10, 0]
    assert ask(0.2, 0) == [9, 1]
    assert ask(1.0, 0) == [5, 5]
    assert ask(0.0, 3) == [7, 3]
    assert ask(0.5, 3) == [6, 4]


def test_adakv_gives_a_layer_no_more_for_its_scores() -> None:
    capacity, recent = torch.full((1, 1, 2), 30), torch.zeros(1, 1, 2, dtype=torch.int64)
    for layer, scale in ((0, 1.0), (1, 100.0)):
        request = BudgetRequest(
            total=torch.tensor([40]),
            capacity=capacity,
            floor=recent,
            layers=(layer,),
            num_layers=2,
            scores=[torch.rand(1, 2, 30) * scale],
        )
        assert int(AdaKV().allocate(request).sum()) == 20


def test_pooled_refuses_a_part_of_the_layers() -> None:
    request = BudgetRequest(
        total=torch.tensor([4]),
        capacity=torch.full((1, 1, 2), 3),
        floor=torch.zeros(1, 1, 2, dtype=torch.int64),
        layers=(1,),
        num_layers=2,
        scores=[torch.zeros(1, 2, 3)],
    )
    with pytest.raises(ValueError, match="all 2 layers"):
        Pooled().allocate(request)


@pytest.mark.parametrize("kind", [AdaKV, Pooled])
@pytest.mark.parametrize("floor", [-0.1, 1.1])
def test_refuses_a_floor_that_is_no_fraction(kind: type, floor: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        kind(floor=floor)
