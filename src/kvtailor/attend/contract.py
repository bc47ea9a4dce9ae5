"""The room `attend`: query + segments -> output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.types import Segment, Visibility

__all__ = ["Attended", "Attention"]


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What one attention call gives.

    Attributes:
        output: (b, q, t, dv) in the query's dtype. A query that sees nothing gives zeros.
        lse: (b, q, t) float32 log-sum-exp of the scaled logits that were read; None where the method has none.
        mass: for each part (m, s) float32: attention probability that each slot received, summed over the group's query
            heads and over `real_queries`; None where nobody asked.
        read: tokens read by each (row, kv head) for the last query, (b, h) int64; None where all were.
    """

    output: Tensor
    lse: Tensor | None = None
    mass: list[Tensor] | None = None
    read: Tensor | None = None


class Attention(ABC):
    """One way to read the cache. A subclass is a frozen, keyword-only dataclass of its hyper-parameters.

    Attributes:
        needs_codec: name of the codec whose segments this method reads (page bounds, say); None: any.
        gives_mass: `attend` honours `want_mass`.
    """

    needs_codec: ClassVar[str | None] = None
    gives_mass: ClassVar[bool] = False

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        parts: Sequence[Segment],
        visible: Visibility,
        scaling: float,
        *,
        want_mass: bool = False,
        real_queries: Tensor | None = None,
    ) -> Attended:
        """Attention of the new tokens over everything held.

        Args:
            query: (b, q, t, d) post-RoPE queries.
            parts: segments in time order; the last t columns of the last part are the new tokens themselves.
            visible: what each query may see.
            scaling: the model's own factor before the softmax.
            want_mass: also give `Attended.mass`.
            real_queries: (b, t) bool: queries that are not padding, the only ones that count for the mass; None: all.
        """

    def flops(self, encoded: Sequence[Segment], *, group: int, size: int) -> int | None:
        """What one new token costs beyond logits and output of the tokens that it reads; None: not known.

        Counted as in `Scorer.flops`, for all rows and kv heads of a layer. The reading itself, 2 * (d + dv) for each
        query head and token read, is counted apart, from `Attended.read`; so is decoding, see `Codec.decode_flops`.

        Args:
            encoded: the segments at hand, without the tail.
            group: g, query heads of a kv head.
            size: d, of a key.
        """
        return None
