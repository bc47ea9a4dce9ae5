"""The stage `attend`: query + segments -> output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from kvtailor.method import Method
from kvtailor.types import Rotation, Segment, Visibility

__all__ = ["NO_FACTS", "Attended", "Attention", "AttentionContext"]


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What one attention call gives.

    Attributes:
        output: (b, q, t, dv) in the query's dtype. A query that sees nothing gives zeros.
        lse: (b, q, t) float32 log-sum-exp of the scaled logits that were read; None where the method has none.
        mass: for each part (m, s) float32: attention probability that each slot received, summed over the group's query
            heads and over `real_queries`; None where nobody asked.
        read: tokens read by each (row, kv head) for the last query, (b, h) int64; None where all were.
        carry: what this method wants to find in `AttentionContext.carry` at the layer's next call; batch rows first,
            and in storages of their own. Lost where tokens are taken back outside of a recorded forward.
    """

    output: Tensor
    lse: Tensor | None = None
    mass: list[Tensor] | None = None
    read: Tensor | None = None
    carry: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What an attention may know of the layer that it reads.

    Attributes:
        layer: 0-based among the layers that the plan compresses.
        layers: how many the plan compresses.
        rotation: the layer's rotary embedding; None where the method does not need it.
        carry: what the method's last `attend` or `index` on this layer left; empty at first.
        deferred: the context is still being fed, so that even a single new token is a part of it and not decoded.
    """

    layer: int = 0
    layers: int = 1
    rotation: Rotation | None = None
    deferred: bool = False
    carry: Mapping[str, Tensor] = field(default_factory=dict)


NO_FACTS = AttentionContext()


class Attention(Method, ABC):
    """One way to read the cache. A subclass is a frozen, keyword-only dataclass of its hyper-parameters.

    Attributes:
        needs_codec: name of the codec whose segments this method reads (page bounds, say); None: any.
        gives_mass: `attend` honours `want_mass`.
        weighs_tokens: `attend` honours `Reading.log_weight`.
        needs_rotation: `attend` needs `AttentionContext.rotation`.
        in_cache_positions: positions count what is held, so that a model may see more tokens than it was made for.
        reads_alike: several new tokens at once read what each would read alone, as speculation asks of a target.
        graph_safe: for one new token `attend` does the same at every step in which nothing is evicted or encoded, but
            for the `Layout.lengths` that it reads on the device; so a step can be recorded and replayed.
    """

    needs_codec: ClassVar[str | None] = None
    gives_mass: ClassVar[bool] = False
    weighs_tokens: ClassVar[bool] = False
    needs_rotation: ClassVar[bool] = False
    in_cache_positions: ClassVar[bool] = False
    reads_alike: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = False

    def held_tokens(self, tokens: Tensor) -> Tensor | None:
        """Tokens to hold per kv head, (b,) int64, of rows that have seen `tokens` (b,) int64, both on the CPU.

        For methods that split one budget between what is held and what is read; a plan with such a method needs no
        budget of its own, and has one that goes before. None: the method does not care what is held.
        """
        return None

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
        facts: AttentionContext = NO_FACTS,
    ) -> Attended:
        """Attention of the new tokens over everything held.

        Args:
            query: (b, q, t, d) post-RoPE queries.
            parts: segments in time order; the last t columns of the last part are the new tokens themselves.
            visible: what each query may see.
            scaling: the model's own factor before the softmax.
            want_mass: also give `Attended.mass`.
            real_queries: (b, t) bool: queries that are not padding, the only ones that count for the mass; None: all.
            facts: of the layer.
        """

    def index(self, parts: Sequence[Segment], visible: Visibility, facts: AttentionContext) -> Mapping[str, Tensor]:
        """What this method wants to find in `AttentionContext.carry` from now on, in place of what its last call left.

        Asked when what is held has changed otherwise than by one more token: at the end of a forward of several
        tokens, when all that it evicts and encodes is done, and of any that evicts. So an index over what is held is
        in the ledger before the first token is decoded.

        Args:
            parts: what is held now, as for `attend`.
            visible: of the forward that ends.
            facts: of the layer; `carry` is what the forward's call of `attend` left.

        Returns:
            Tensors of a storage of their own, batch rows first.
        """
        return facts.carry

    def flops(
        self,
        encoded: Sequence[Segment],
        *,
        group: int,
        size: int,
        held: Tensor | None = None,
        facts: AttentionContext = NO_FACTS,
    ) -> int | None:
        """What one new token costs beyond logits and output of the tokens that it reads; None: not known.

        Counted as in `Scorer.flops`, for all rows and kv heads of a layer. The reading itself, 2 * (d + dv) for each
        query head and token read, is counted apart, from `Attended.read`; so is decoding, see `Codec.decode_flops`.

        Args:
            encoded: the segments at hand, without the tail.
            group: g, query heads of a kv head.
            size: d, of a key.
            held: (b, h) int64 tokens held, the new one included; None where nobody counted.
            facts: of the layer before the call.
        """
        return None
