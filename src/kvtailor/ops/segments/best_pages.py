"""Pages of keys, each with the range of its channels, of which one new token reads the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["BestPages"]


@dataclass(frozen=True, kw_only=True)
class BestPages:
    """What is read of some parts: the pages with the highest bounds over all parts, and all of those without pages.

    Attributes:
        page: slots of a page; the last of a lane may have fewer.
        most: pages that are read of each row and kv head, where there are as many.
        bounds: of each part the least and the greatest of each key channel over a page, (m, p, d); None: no pages.
    """

    page: int
    most: int
    bounds: Sequence[tuple[Tensor, Tensor] | None]
