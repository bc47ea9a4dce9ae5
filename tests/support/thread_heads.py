"""Processes that share kv heads, as threads of this one: what they exchange meets on a board, behind barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from torch import Tensor

from kvtailor.types import HeadShare, Held, Moments

__all__ = ["ThreadHeads", "held_of_share", "on_ranks"]

_T = TypeVar("_T")
# A rank that calls fewer collectives than another would make it wait for ever.
_PATIENCE = 30.0
# Axis of the kv heads, or of the query heads, of what a `Held` has for each head.
_BY_HEAD = {
    "keys": 1,
    "values": 1,
    "positions": 1,
    "valid": 1,
    "queries": 1,
    "mass": 1,
    "sampled": 1,
    "previous": 1,
    "repeated": 1,
    "reconstruction": 1,
    "log_weight": 1,
    "output": 0,
}


@dataclass
class _Board:
    barrier: threading.Barrier
    slots: list[Tensor | None]
    exchanges: int = 0


class ThreadHeads(HeadShare):
    """One rank's end of the board."""

    def __init__(self, rank: int, ranks: int, board: _Board):
        self.rank, self.ranks, self.board = rank, ranks, board

    def _of_all(self, tensor: Tensor) -> Sequence[Tensor]:
        self.board.slots[self.rank] = tensor.clone()
        self.board.barrier.wait(_PATIENCE)
        found = [each.clone() for each in self.board.slots if each is not None]
        self.board.exchanges += self.rank == 0
        self.board.barrier.wait(_PATIENCE)
        return found


def on_ranks(ranks: int, work: Callable[[HeadShare], _T]) -> list[_T]:
    """What `work` returns on each rank; all ranks must exchange alike."""
    board = _Board(threading.Barrier(ranks), [None] * ranks)

    def one(rank: int) -> _T:
        try:
            return work(ThreadHeads(rank, ranks, board))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def held_of_share(held: Held, share: HeadShare, by_head: Sequence[str] = ()) -> Held:
    """The part of a layer that a rank holds.

    Args:
        held: the whole layer.
        share: the rank.
        by_head: names of the calibration's tensors that have one part for each kv head.
    """
    parts = {
        each.name: share.own(value, _BY_HEAD[each.name])
        for each in fields(held)
        if each.name in _BY_HEAD and (value := getattr(held, each.name)) is not None
    }
    if held.moments is not None:
        parts["moments"] = Moments(
            count=held.moments.count, mean=share.own(held.moments.mean, 1), spread=share.own(held.moments.spread, 1)
        )
    if held.calibration is not None:
        parts["calibration"] = {
            name: share.own(tensor, 0) if name in by_head else tensor for name, tensor in held.calibration.items()
        }
    return replace(held, share=share, **parts).meeting_others()
