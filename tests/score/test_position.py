"""Sinks and the recent window."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.held_rows import held_of, make_row

from kvtailor.score.position import Position
from kvtailor.types import Held, Needs


def held(*lengths: int) -> Held:
    generator = torch.Generator().manual_seed(0)
    return held_of([make_row(n, heads=2, group=1, size=4, generator=generator) for n in lengths], Needs())


def kept(scores: torch.Tensor, budget: int) -> list[int]:
    return sorted(scores.argsort(descending=True)[:budget].tolist())


def test_keeps_sinks_and_then_the_newest() -> None:
    scores = Position(sinks=2).score(held(9))[0, 0]
    assert kept(scores, 5) == [0, 1, 6, 7, 8]
    assert kept(scores, 1) == [0]


def test_sinks_are_each_rows_first_real_tokens() -> None:
    batch = held(9, 6)
    scores = Position(sinks=2).score(batch)[1, 1].masked_fill(~batch.valid[1, 1], -torch.inf)
    assert kept(scores, 4) == [3, 4, 7, 8]


def test_without_sinks_it_is_a_sliding_window() -> None:
    assert kept(Position(sinks=0).score(held(9))[0, 0], 3) == [6, 7, 8]


def test_columns_count_and_not_slots() -> None:
    base = held(4)
    far = dataclasses.replace(base, positions=torch.tensor([0, 1, 800, 900]).expand(1, 2, 4), seen=901)
    assert kept(Position(sinks=1).score(far)[0, 0], 3) == [0, 2, 3]


def test_it_evicts_while_it_decodes_and_refuses_negative_sinks() -> None:
    assert Position().slack == 32 and Position().sinks == 4
    with pytest.raises(ValueError, match="sinks"):
        Position(sinks=-1)
