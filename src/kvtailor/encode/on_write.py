"""On write: a codec of single tokens, through which each token goes before anything reads it, its prompt included.

*Idea* A serving engine writes each token into a cache of codes and reads it there. So a prompt's own attention is that
of the codes, and what later layers make of it carries their errors. Here a prompt is otherwise read whole before its
tokens are encoded, which loses less. With this codec around another one, keys and values are rounded through it before
anything reads them, so that a plan loses what an engine's cache of the same codes does.
*Paper* None: what engines do.
*Source* kvtailor's own code. That engines read so: llama.cpp and vLLM's attention backends hand the cache, and not the
new keys, to their attention.
*Departs* What has been rounded is held in full precision until the inner codec encodes it, as under any plan, and then
rounded once more, which hardly changes codes of single tokens.
*Cost* In time a round trip through the codec for each token, and no fast path of decoded tokens: it is made to measure
what an engine would lose. In memory nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Around, Codec, CodecContext
from kvtailor.types import Layout, Segment

__all__ = ["OnWrite"]


@dataclass(frozen=True, kw_only=True)
class OnWrite(Around, Codec):
    """A codec through which tokens go before anything reads them; `Engine.written` is what lets them.

    Attributes:
        of: the codec. It encodes each token by itself.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "on_write(of=vector(bits=4))",
        "on_write(of=hadamard(of=vector))",
    )

    def __post_init__(self) -> None:
        if self.of.exact:
            raise ValueError("on_write: the codec in `of` loses nothing: leave on_write out")
        if self.of.lane_multiple > 1 or self.of.needs.window or self.of.across or self.of.ages:
            raise ValueError(
                f"on_write: {type(self.of).__name__} in `of` encodes tokens together, or by what comes later, so that "
                "no token has a code when it comes: give a codec of single tokens, such as vector, ggml or static_fp8"
            )

    @property
    def rounds_on_write(self) -> bool:
        """True: that is what it is for."""
        return True

    def segment_type(self) -> type[Segment]:
        return self.of.segment_type()

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> Segment:
        """Encode keys (m, s, d) and values (m, s, dv) by the inner codec.

        Raises:
            CacheMisuse: NaN or infinity.
        """
        return self.of.encode(layout, keys, values, first)

    def for_layer(self, context: CodecContext) -> OnWrite:
        return replace(self, of=self.of.for_layer(context))

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        return self.of.restore(layout, fields, tensors)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Count those of the inner codec, once when a token comes and once when it is encoded, and of decoding it."""
        encoding = self.of.encode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        decoding = self.of.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        return None if encoding is None or decoding is None else 2 * encoding + decoding

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        return self.of.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size)

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int | None:
        return self.of.read_flops(tokens=tokens, queries=queries, key_size=key_size, value_size=value_size)
