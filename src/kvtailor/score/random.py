"""Random: the control that every score must beat.

*Idea*: a number that depends on no key, value or query. It follows from the layer, the kv head, the token and `state`
alone, so the same tokens stay however the prompt is cut into chunks or batches.

*Paper*: none; a control.

*Source*: our own.

*Departs*: nothing known. The draw depends on the head's number, so this scorer alone depends on the order of heads.

*Cost*: no evidence, no extra memory, a few passes over the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.ops.lanes.drawn import uniform
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["Random"]


@dataclass(frozen=True, kw_only=True)
class Random(Scorer):
    """Uniform numbers in [0, 1).

    Attributes:
        state: which draw; any integer.
    """

    state: int = 0
    heads_alike: ClassVar[bool] = False

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32."""
        return uniform(held, self.state)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """n: one division for each token; what comes before it is integers."""
        return tokens
