"""Drop: what is not kept is gone.

*Idea*: eviction as most papers mean it. Kept tokens stay bit for bit as the model made them.

*Paper*: none; what every plan does that names no merger.

*Source*: our own.

*Departs*: nothing known.

*Cost*: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtailor.merge.contract import Merger
from kvtailor.types import Held

__all__ = ["Drop"]


@dataclass(frozen=True, kw_only=True)
class Drop(Merger):
    """Folds nothing. The default of the stage."""

    def merge(self, held: Held, keep: Tensor, into: Tensor) -> None:
        """None: nothing changes."""
        return None

    def flops(self, *, tokens: int, kept: int, group: int, size: int) -> int:
        """0: nothing is computed."""
        return 0
