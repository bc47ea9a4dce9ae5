"""Position: the first tokens (sinks) and the newest.

*Idea*: attention that no token needs goes to the first few tokens, and most of the rest goes to the newest. So those
two runs stay and the middle is dropped, whatever it holds.

*Paper*: StreamingLLM, "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.2; our
`sinks` = its number of initial tokens, 4.

*Source*: the paper and a description of its repository (MIT).

*Departs*: keys keep the position at which they were rotated, where the paper rotates anew with positions inside the
cache: this is the static form, "sinks and the recent window". The paper evicts after every token; here the cache is cut
back once it is `slack` tokens past the budget, so up to that many more are held. `sinks=0` is the plain sliding window,
a control that is known to fail.

*Cost*: no evidence, no extra memory, one pass over the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["Position"]


@dataclass(frozen=True, kw_only=True)
class Position(Scorer):
    """The newest tokens score highest, and each row's first real tokens above them.

    Attributes:
        sinks: first tokens of each row, padding not counted, that outrank all others; the earliest highest.
    """

    sinks: int = 4
    slack: ClassVar[int | None] = 32
    same_on_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"position: sinks must be 0 or more, found {self.sinks}; 0 is a plain sliding window")

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32; exact up to 2**24 tokens."""
        age = held.positions - held.first[:, None, None]
        newest = (held.seen - held.first)[:, None, None]
        return torch.where(age < self.sinks, newest + self.sinks - age, age).to(torch.float32)

    @property
    def first_kept(self) -> int:
        """The sinks."""
        return self.sinks

    def newest_kept(self, kept: int) -> int:
        """All but the sinks."""
        return max(kept - self.sinks, 0)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """0: ages are integers."""
        return 0
