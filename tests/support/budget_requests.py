"""Requests for budgets, written down by hand, and attention that is known or comes from loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tests.support.held_rows import Row
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.types import Held


def asked(
    total: int,
    capacity: Sequence[int] | Tensor,
    *,
    heads: int = 1,
    floor: int = 0,
    layers: int | None = None,
    measured: Sequence[object] | None = None,
    scores: Sequence[Tensor] | None = None,
) -> BudgetRequest:
    """One row. `capacity`: of each present layer's heads, or (l, h); `layers`: how many there are in all."""
    held = torch.as_tensor(capacity)
    held = held[:, None].expand(-1, heads) if held.ndim == 1 else held
    present = held.shape[0]
    return BudgetRequest(
        total=torch.tensor([total]),
        capacity=held[None].clone(),
        floor=held[None].clamp(max=floor),
        layers=tuple(range(present)),
        num_layers=present if layers is None else layers,
        measured=None if measured is None else [torch.tensor([each]) for each in measured],
        scores=scores,
    )


def held_with(rows: list[list[float]], *, heads: int = 1, window: int | None = None) -> Held:
    """One row of the batch whose n queries give their tokens the probabilities `rows` (n, n), alike in all heads.

    Keys are unit vectors, so a query is the logarithm of its row.
    """
    n = len(rows)
    logits = torch.tensor([[math.log(x) if x else -1e4 for x in row] for row in rows])
    window = n if window is None else window
    return Held(
        keys=torch.eye(n).expand(1, heads, n, n),
        values=torch.zeros(1, heads, n, 1),
        positions=torch.arange(n).expand(1, heads, n),
        valid=torch.ones(1, heads, n, dtype=torch.bool),
        first=torch.zeros(1, dtype=torch.int64),
        seen=n,
        layer=0,
        layers=1,
        scaling=1.0,
        queries=logits[n - window :].expand(1, heads, window, n),
        query_columns=torch.arange(n - window, n),
    )


def rows_of_attention(row: Row, window: int) -> list[list[list[float]]]:
    """For each query head the probabilities of its newest queries, by loops; the future is left out of each list."""
    heads, n, size = row.keys.shape
    group = row.queries.shape[0] // heads
    found = []
    for head in range(heads * group):
        of_head = []
        for query in range(max(0, n - window), n):
            logits = (row.keys[head // group, : query + 1].double() @ row.queries[head, query].double()).tolist()
            powers = [math.exp(logit / math.sqrt(size)) for logit in logits]
            of_head.append([power / sum(powers) for power in powers])
        found.append(of_head)
    return found
