"""Multi-head latent attention: what a layer does that caches one latent for all of its heads.

Such a layer stores, for each token, a latent c of r numbers and a rotated key k of e numbers. Head j makes its key
[U_j c ; k] and its value V_j c of them (DeepSeek-V2, arXiv 2405.04434, section 2.1). Since
[q ; p] . [U_j c ; k] = [U_j^T q ; p] . [c ; k], and since a sum of values is V_j times the same sum of latents, the
layer is attention of all query heads over *one* kv head, whose key is [c ; k] and whose value is c. Queries are
*absorbed* before it, and its output is *lifted* behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

__all__ = ["LatentAttention"]


class LatentAttention(ABC):
    """The projections of one layer, as they are at each call.

    Shape letters: H query heads, d = d' + e size of their keys, dv of their values, r of a latent, e of a rotated key.
    """

    @abstractmethod
    def absorbed(self, query: Tensor) -> Tensor:
        """Return queries (b, H, t, d) as queries (b, H, t, r + e) of the one kv head."""

    @abstractmethod
    def lifted(self, sums: Tensor) -> Tensor:
        """Return weighted sums of latents (b, H, t, r) as those of each head's values, (b, H, t, dv)."""

    @abstractmethod
    def expanded(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return each head's keys (m, H, s, d) and values (m, H, s, dv) of latents (m, s, r) and keys (m, s, e)."""

    @abstractmethod
    def expands_cheaply(self, new: int, held: int) -> bool:
        """Return whether so many queries over so many tokens compute less on expanded keys than on latents."""
