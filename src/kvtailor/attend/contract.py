"""The stage `attend`: query + segments -> output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static, signature
from typing import Any, ClassVar, Literal

from torch import Tensor

from kvtailor.method import Method
from kvtailor.ops.segments.attention_inputs import BestPages
from kvtailor.types import ALL_HEADS, PLAIN_SOFTMAX, HeadShare, Rotation, Segment, Softmax, Visibility

__all__ = [
    "Attended",
    "Attention",
    "AttentionContext",
    "AttentionRequest",
    "FlopsRequest",
    "IndexRequest",
    "READS_ALL",
    "FastPathReading",
]

READS_ALL = "reads all"
"""`Attention.prompt_pass` of those that read a prompt by `ops.attention.parts.read_all`, as `segments` does."""


@dataclass(frozen=True, kw_only=True)
class Attended:
    """The result of one attention call.

    Attributes:
        output: (b, q, t, dv) in the query's dtype. A query that sees nothing gives zeros.
        lse: (b, q, t) float32 log-sum-exp of the scaled logits that were read; None: the method does not compute it.
        mass: for each part (m, s) float32: attention probability that each slot received, summed over the group's query
            heads and over `AttentionRequest.real_queries`; None unless `AttentionRequest.want_mass`.
        tokens_read: tokens read by each (row, kv head) for the last query, (b, h) int64; None where all were.
        carry: what `AttentionContext.carry` holds at the layer's next call; batch rows first, in storages of its own.
            It is lost if tokens are taken back outside of a recorded forward.
    """

    output: Tensor
    lse: Tensor | None = None
    mass: list[Tensor] | None = None
    tokens_read: Tensor | None = None
    carry: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What an attention may know of the layer that it reads.

    Attributes:
        layer: 0-based among the layers that the plan compresses.
        layers: how many the plan compresses.
        rotation: the layer's rotary embedding; None where the method does not need it.
        carry: what the method's last `attend` or `index` on this layer left; empty at first.
        deferred: the context is still being fed, so even a single new token belongs to it and is not decoded.
        share: which of the model's heads the parts hold.
    """

    layer: int = 0
    layers: int = 1
    rotation: Rotation | None = None
    deferred: bool = False
    carry: Mapping[str, Tensor] = field(default_factory=dict)
    share: HeadShare = ALL_HEADS


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """The new tokens' queries, and everything that they may read.

    Attributes:
        query: (b, q, t, d) post-RoPE queries.
        parts: segments in time order; the last t columns of the last part are the new tokens themselves.
        visible: which columns each query may see.
        scaling: the model's own factor before the softmax.
        want_mass: return `Attended.mass` as well.
        softmax: what the model's softmax has besides `scaling`.
        real_queries: (b, t) bool: queries that are not padding, the only ones that count for the mass; None: all.
        context: of the layer.
    """

    query: Tensor
    parts: Sequence[Segment]
    visible: Visibility
    scaling: float
    want_mass: bool = False
    real_queries: Tensor | None = None
    context: AttentionContext = field(default_factory=AttentionContext)
    softmax: Softmax = PLAIN_SOFTMAX


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """What a layer holds at the end of a forward, for `Attention.index`.

    Attributes:
        parts: what is held now, as in `AttentionRequest`.
        visible: of the forward that ends.
        context: of the layer; `carry` is what the forward's `attend` returned.
    """

    parts: Sequence[Segment]
    visible: Visibility
    context: AttentionContext = field(default_factory=AttentionContext)


@dataclass(frozen=True, kw_only=True)
class FastPathReading:
    """What each decoded token reads, as long as only the tail grows.

    Attributes:
        up_to: valid while a row and kv head holds at most so many tokens; None: always valid.
        pages: only the best of these pages are read; None: everything is read.
        carried: the first part is read from the carry, as `first_keys` (b, h, s, d) and `first_values` (b, h, s, dv);
            without them there is no fast path.
    """

    up_to: int | None = None
    pages: BestPages | None = None
    carried: bool = False


@dataclass(frozen=True, kw_only=True)
class FlopsRequest:
    """The step that `Attention.flops` counts: one new token of each row.

    Attributes:
        encoded: the segments at hand, without the tail.
        group: g, query heads of a kv head.
        size: d, of a key.
        held: (b, h) int64 tokens held, the new one included; None where they were not counted.
        context: of the layer before the call.
    """

    encoded: Sequence[Segment]
    group: int
    size: int
    held: Tensor | None = None
    context: AttentionContext = field(default_factory=AttentionContext)


@dataclass(frozen=True, kw_only=True)
class CarryRequest:
    """The sizes of a layer after a prompt and some decoded tokens, for `Attention.carried_bytes`.

    Attributes:
        rows, heads, q_heads: b, h and q.
        size: d, of a key.
        element_size: bytes of an element of the cache's dtype.
        held: least and most tokens that the layer holds, over all rows and kv heads.
        longest: most tokens that one row and kv head holds.
        context: tokens of the prompt, in each row, which was read at once.
        new_tokens: tokens that were decoded after it.
    """

    rows: int
    heads: int
    q_heads: int
    size: int
    element_size: int
    held: tuple[int, int]
    longest: int
    context: int
    new_tokens: int


# What a method of another package had to take before these requests, and takes now.
_OF_REQUESTS = {
    "attend": "attend(self, request: AttentionRequest)",
    "index": "index(self, request: IndexRequest)",
    "flops": "flops(self, request: FlopsRequest)",
    "carried_bytes": "carried_bytes(self, request: CarryRequest)",
}


class Attention(Method, ABC):
    """One way to read the cache. A subclass is a frozen, keyword-only dataclass of its hyper-parameters.

    Attributes:
        needs_codec: name of the codec whose segments this method reads (page bounds, say); None: any.
        gives_mass: `attend` supports `AttentionRequest.want_mass`.
        weighs_tokens: `attend` supports `SegmentView.log_weight`.
        needs_rotation: `attend` needs `AttentionContext.rotation`.
        in_cache_positions: positions count held tokens only, so that texts may be longer than the model allows.
        reads_alike: a new token reads the same alone and among others, which speculation requires of its target.
        graph_safe: between evictions and encodings `attend` does the same at every decoded token, except for the
            `Layout.lengths` that it reads on the device; so a step can be recorded and replayed.
        carry_of: entries of `AttentionContext.carry` that are kept if a saved cache is loaded on another number of
            processes, and whether each belongs to a "row" (b,), a kv "head" (b, h, ..., k), or "queries" (b, q, w, d).
            If heads differ in k, the shorter ones end in 0.0 or -1. `index` makes all other entries again.
        has_token_budget: its argument `tokens` says how many tokens it reads for each new one.
    """

    sees_attention: ClassVar[bool] = True
    needs_codec: ClassVar[str | None] = None
    gives_mass: ClassVar[bool] = False
    weighs_tokens: ClassVar[bool] = False
    needs_rotation: ClassVar[bool] = False
    in_cache_positions: ClassVar[bool] = False
    reads_alike: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = False
    has_token_budget: ClassVar[bool] = False
    carry_of: ClassVar[Mapping[str, Literal["row", "head", "queries"]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse the signatures that these methods had before they took requests (decision 0016).

        Raises:
            TypeError: a method of the class cannot be called with one request.
        """
        super().__init_subclass__(**options)
        for name, now in _OF_REQUESTS.items():
            method = getattr_static(cls, name)
            if method is vars(Attention)[name]:
                continue
            of_class = isinstance(method, staticmethod)
            try:
                signature(method.__func__ if of_class else method).bind(*[None] * (1 if of_class else 2))
            except TypeError as error:
                raise TypeError(
                    f"{cls.__qualname__}.{name}{signature(getattr(cls, name))} cannot be called with one request "
                    f"({error}); write {now}, and read its fields (kvtailor.attend.contract)"
                ) from None

    def held_tokens(self, tokens: Tensor) -> Tensor | None:
        """Return how many tokens rows that have seen `tokens` (b,) should hold per kv head, (b,) int64 on the CPU.

        For methods that split one budget between holding and reading. A plan with such a method needs no budget; one
        that it has takes precedence. None: the method sets no budget.
        """
        return None

    def read_on_fast_path(self, layer: int, parts: Sequence[Segment]) -> FastPathReading | None:
        """Return what one decoded token reads, if reading is all that `attend` does for it; None: it does more.

        The attention is that of `segments` over what is read, and the carry does not change.

        Args:
            layer: 0-based among the layers that the plan compresses.
            parts: what is held, in time order.
        """
        return None

    def prompt_pass(self) -> str | None:
        """Return a name for how `attend` reads a first prompt that is fed at once; None: as no other method does.

        Methods with the same name give the same output and mass, bit for bit, and neither carry nor `tokens_read`. So
        caches under different plans can share one prefill (`hf.run.kept_prompt`). A class that overrides `attend` must
        override this as well, see `shared_pass`.
        """
        return None

    def shared_pass(self) -> str | None:
        """Return `prompt_pass`; None if `attend` is overridden in a subclass of the class that defines it."""
        for kind in type(self).__mro__:
            if "prompt_pass" in vars(kind):
                return self.prompt_pass()
            if "attend" in vars(kind):
                return None
        return None

    @abstractmethod
    def attend(self, request: AttentionRequest) -> Attended:
        """Return the attention of the new tokens over everything held."""

    def index(self, request: IndexRequest) -> Mapping[str, Tensor]:
        """Return what replaces `AttentionContext.carry`, such as an index over what is held.

        Called at the end of a forward of several tokens, after evicting and encoding, and of each forward that evicts.
        So an index is in the ledger before the first token is decoded.

        Returns:
            Tensors of a storage of their own, batch rows first.
        """
        return request.context.carry

    def flops(self, request: FlopsRequest) -> int | None:
        """Count the operations of one decoded token beyond logits and output; None: not known.

        Counted as in `Scorer.flops`, for all rows and kv heads of a layer. Logits and output, 2 * (d + dv) for each
        query head and token read, are counted elsewhere, from `Attended.tokens_read`; so is decoding of codes, see
        `Codec.decode_flops`.
        """
        return None

    def carried_bytes(self, request: CarryRequest) -> tuple[int, int]:
        """Return least and most bytes of one layer's `AttentionContext.carry`.

        For forecasts of a cache's size before any run. A method that carries tensors overrides this.

        Raises:
            ValueError: the method makes an index, and does not override this.
        """
        if getattr_static(type(self), "index") is not vars(Attention)["index"]:
            raise ValueError(
                f"{type(self).__qualname__} carries an index from call to call and does not tell its bytes: override "
                "carried_bytes (kvtailor.attend.contract)"
            )
        return 0, 0
