"""Pairs of cases of two lists: the default run takes a few that meet every case of both, `make test-all` all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

__all__ = ["crossed"]


def crossed(
    first: Sequence[Any], second: Sequence[Any], *, each: int = 1, possible: Callable[[Any, Any], bool] | None = None
) -> list[Any]:
    """Every pair as pytest's parameters, in order; all but some marked `long`.

    Args:
        first, second: at least one case each.
        each: how often at least the default run meets every case of both lists, or as often as the other list lasts.
        possible: of a pair; None: all are. Others are left out, and a case of the longer list takes the next instead.
    """
    n, m = len(first), len(second)
    near: set[tuple[int, int]] = set()
    for i in range(max(n, m)):
        pairs = [((i + k) % n, i) if m >= n else (i, (i + k) % m) for k in range(min(n, m))]
        near.update([(a, b) for a, b in pairs if possible is None or possible(first[a], second[b])][:each])
    return [
        pytest.param(one, other, marks=() if (i, j) in near else pytest.mark.long)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
        if possible is None or possible(one, other)
    ]
