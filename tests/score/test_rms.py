"""RMS: the root of the mean squared attention of reference queries, against a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row
from torch import Tensor

from kvtailor.score.rms import RMS
from kvtailor.types import Softmax


def turned(query: Tensor, by: int) -> Tensor:
    """Channels 0 and 2, and 1 and 3, are planes that turn by 1 and 0.1 a position; see `held_of`."""
    found = query.clone()
    for plane, frequency in enumerate((1.0, 0.1)):
        cos, sin = math.cos(frequency * by), math.sin(frequency * by)
        found[plane] = query[plane] * cos - query[plane + 2] * sin
        found[plane + 2] = query[plane] * sin + query[plane + 2] * cos
    return found


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_equals_a_plain_loop(softcap: float | None, sinks: bool) -> None:
    scorer, generator = RMS(window=4, spread=6), torch.Generator().manual_seed(1)
    rows = [make_row(n, heads=3, group=2, size=5, generator=generator) for n in (63, 21)]
    held = held_of(rows, scorer.needs)
    sink = torch.randn(6, generator=generator) if sinks else None
    held = replace(
        held,
        softmax=Softmax(softcap=softcap, sinks=sink),
        log_weight=torch.randn(held.valid.shape, generator=generator),
        repeated=torch.randn(2, 6, 3, 5, generator=generator),
        repeated_columns=torch.tensor([[0, 1, 2], [0, -1, -1]]),
    )
    scores = scorer.score(held)
    for row in range(2):
        for head in range(3):
            there = held.valid[row, head]
            squares, count = torch.zeros(int(there.sum()), dtype=torch.float64), 0
            for query_head in (2 * head, 2 * head + 1):
                own = held.queries[row, query_head]
                asked = list(zip(own, held.query_columns.tolist(), strict=True))
                asked += [(q, held.seen) for q in held.repeated[row, query_head][held.repeated_columns[row] >= 0]]
                for query, column in zip(
                    held.sampled[row, query_head], held.sampled_columns[row].tolist(), strict=True
                ):
                    if column >= 0:
                        asked.append((turned(query, held.seen - column), held.seen))
                for query, column in asked:
                    logits = held.keys[row, head, there].double() @ query.double() * held.scaling
                    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
                    logits = logits + held.log_weight[row, head, there].double()
                    logits = logits.masked_fill(held.positions[row, head, there] > column, -torch.inf)
                    if sink is not None:
                        logits = torch.cat([logits, sink[query_head].double().view(1)])
                    squares += logits.softmax(-1)[: len(squares)] ** 2
                    count += 1
            assert torch.allclose(scores[row, head, there].double(), (squares / count).sqrt(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("given", [{"window": 0}, {"spread": -1}, {"repeat": -1}], ids=str)
def test_refuses_what_makes_no_sense(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="^rms: "):
        RMS(**given)
