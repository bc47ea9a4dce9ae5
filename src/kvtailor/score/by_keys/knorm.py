"""KNorm: the tokens whose keys are short.

*Idea*: in trained models a token whose key has a small L2 norm tends to receive much attention. So the shortest keys
stay, and neither queries nor the order of tokens are used.

*Paper*: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430; our score =
minus its norm.

*Source*: the paper and a reading of kvpress (Apache-2.0); nothing was taken.

*Departs*: the paper leaves the first layers whole (the first two in its code, since their norms tell little); here all
layers that the plan compresses are cut. It cuts as soon as the cache is longer than its limit; here once it is `slack`
tokens past the budget. `recent` is ours: the paper protects no newest tokens.

*Cost*: no evidence; one pass over the keys, one kv head at a time, so the scratch is float32 (b, n, d) at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["KNorm"]


@dataclass(frozen=True, kw_only=True)
class KNorm(Scorer):
    """Minus the L2 norm of each key.

    Attributes:
        recent: newest tokens that always stay.
    """

    recent: int = 0
    slack: ClassVar[int | None] = 32
    serves: ClassVar[Serves] = Serves(
        latents="it measures the length of keys, and the length of a latent is that of no head's key"
    )

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise ValueError(f"knorm: recent must be 0 or more tokens, found {self.recent}; the paper uses 0")

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, not positive."""
        # Norms in half precision would tie for most tokens of a head.
        wide = torch.promote_types(held.keys.dtype, torch.float32)
        norms = [torch.linalg.vector_norm(keys, dim=-1, dtype=wide).float() for keys in held.keys.unbind(1)]
        return torch.stack(norms, dim=1).neg_()

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """2 d n: a multiply-add for each channel of each key, less one addition, and the root."""
        return 2 * tokens * size
