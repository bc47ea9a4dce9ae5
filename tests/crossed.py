"""Pairs of cases of two lists: the default run takes a few that meet every case of both, `make test-all` all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["crossed"]


def crossed(first: Sequence[Any], second: Sequence[Any], *, each: int = 1) -> list[Any]:
    """Every pair as pytest's parameters, in order; all but some marked `long`.

    Args:
        first, second: at least one case each.
        each: how often at least the default run meets every case of both lists, or as often as the other list lasts.
    """
    n, m = len(first), len(second)
    wide = max(n, m)
    near = {((i + k) % n, i) if m == wide else (i, (i + k) % m) for i in range(wide) for k in range(min(each, n, m))}
    return [
        pytest.param(one, other, marks=() if (i, j) in near else pytest.mark.long)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]
