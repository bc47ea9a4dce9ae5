"""Bit table: a codec whose keys and values have other bits on other layers.

*Idea* An error of a key passes through the product with the query and the softmax, one of a value does not; so keys
need more bits, and lower layers more than higher ones. The keys of the first layers and the values of (fewer) first
layers get the high bits, all others the low ones.
*Paper* `tao2025asymkv` (arXiv 2410.13212), section 4; keys = l_k, values = l_v, around `kivi`.
*Source* The paper; kvtailor's own code.
*Departs* Any codec with `key_bits` and `value_bits` may be inside. l_k and l_v may be shares of the layers, and a whole
table may be given. The paper finds l_k and l_v by trying; here they are arguments.
*Cost* That of the inner codec at these bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from kvtailor.encode.contract import Around, Codec, CodecContext
from kvtailor.types import Layout, Segment

__all__ = ["BitTable"]


@dataclass(frozen=True, kw_only=True)
class BitTable(Around, Codec):
    """Bits by layer.

    Attributes:
        of: the codec; its own bits are replaced.
        keys: first layers whose keys get `high` bits: how many, or a share of all if it has a decimal point. Or a list:
            the bits of the keys of each layer.
        values: the same for values.
        high: bits of the first layers.
        low: bits of the others.
    """

    keys: int | float | tuple[int, ...] = 0.5
    values: int | float | tuple[int, ...] = 0.0
    high: int = 2
    low: int = 1
    examples: ClassVar[tuple[str, ...]] = (
        "bit_table(of=kivi, keys=1, high=8, low=4)",
        "bit_table(of=vector, keys=[8, 8, 8], values=[8, 4, 3])",
    )

    def __post_init__(self) -> None:
        own = {each.name for each in fields(self.of)}  # type: ignore[arg-type]
        if not {"key_bits", "value_bits"} <= own:
            raise ValueError(
                "bit_table: of must be a codec with key_bits and value_bits such as kivi, found "
                f"{type(self.of).__name__}"
            )
        for name in ("keys", "values"):
            if getattr(self, name) == 0:
                # No layers are no share of them: one plan, however it is written.
                object.__setattr__(self, name, 0.0)
            given = getattr(self, name)
            if isinstance(given, float) and not 0 <= given <= 1:
                raise ValueError(
                    f"bit_table: {name} must be a share from 0.0 to 1.0, found {given}; a count has no point"
                )
            if isinstance(given, int) and given < 0:
                raise ValueError(f"bit_table: {name} must be 0 layers or more, found {given}")
        # Raises the codec's own error for bits that it cannot have.
        given = [each if isinstance(each, tuple) else (self.high, self.low) for each in (self.keys, self.values)]
        for bits in sorted({*given[0], *given[1]}):
            self._with(key_bits=bits, value_bits=bits)

    @property
    def table_layers(self) -> int | None:
        """The length of a list of bits."""
        return next((len(each) for each in (self.keys, self.values) if isinstance(each, tuple)), None)

    @property
    def bears_offset(self) -> bool:
        """Whether the inner codec does in the bits of each layer's keys."""
        return all(self._with(key_bits=bits).bears_offset for bits in self._key_bits)

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """More layers, or bits for other layers, than the model has."""
        for name in ("keys", "values"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != layers:
                return f"bit_table: {name} has bits for {len(given)} layers; the plan compresses {layers} of this model"
            if isinstance(given, int) and given > layers:
                return f"bit_table: {name} counts {given} layers; the plan compresses {layers} of this model"
        return None

    def for_layer(self, context: CodecContext) -> Codec:
        bits = {f"{name[:-1]}_bits": self._table(name, context.layers)[context.layer] for name in ("keys", "values")}
        return self._with(**bits).for_layer(context)

    def segment_type(self) -> type[Segment]:
        """The inner codec's."""
        return self.of.segment_type()

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> Segment:
        """Refuses: the bits depend on the layer, see `for_layer`.

        Raises:
            ValueError: always.
        """
        raise self._unbound()

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        """As `encode`."""
        raise self._unbound()

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """As `encode`."""
        raise self._unbound()

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec, for which bits make no difference."""
        return self.of.encode_flops(tokens=tokens, key_size=key_size, value_size=value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """As `encode_flops`."""
        return self.of.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size)

    @property
    def _key_bits(self) -> tuple[int, ...]:
        """Bits of keys that a layer may have."""
        if isinstance(self.keys, tuple):
            return self.keys
        of_all = (self.high,) if self.keys == 1.0 and isinstance(self.keys, float) else (self.high, self.low)
        return of_all if self.keys else (self.low,)

    def _with(self, **bits: int) -> Codec:
        inner: Any = self.of
        made: Codec = replace(inner, **bits)
        return made

    def _table(self, name: str, layers: int) -> tuple[int, ...]:
        given: Any = getattr(self, name)
        if isinstance(given, tuple):
            return given
        count = round(given * layers) if isinstance(given, float) else given
        return tuple(self.high if layer < count else self.low for layer in range(layers))

    def _unbound(self) -> ValueError:
        return ValueError("bit_table: the bits depend on the layer; call for_layer first")
