"""KIVI: keys in groups along time within a channel, values in groups of channels within a token, 2 to 8 bits.

*Idea* Outliers of keys sit in a few channels, those of values do not; so each key channel gets its own minimum and step
for every `group` tokens, and each value token its own for every `group` channels. The newest tokens stay as they are.
*Paper* `kivi` (arXiv 2402.02750), sections 3.2 and 4.1; bits = B, group = G, residual = R.
*Source* The paper; kvtailor's own code.
*Departs* Values leave the tail with their keys, a block of `residual` tokens at a time, and not one token at each step
(segments are never rewritten, so a value is in full precision between R and 2 R tokens instead of R). After a prompt
all but the newest R tokens are encoded, where the paper encodes whole blocks of R. A group of equal values, 0 / 0 in
the paper, has the step 1. A segment that is no multiple of `group` ends with a shorter key group. Where `group` does
not divide a value's size, the largest divisor below it is taken. 8 bits, and other bits for keys than for values, are
kvtailor's additions.
*Cost* bits / 8 + 2 * element / group bytes for each element; attention decodes the segment at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.encode.contract import Codec, refuse_non_finite
from kvtailor.ops.quant import dequantise, largest_divisor, pack, packed_size, quantise, unpack
from kvtailor.types import Layout, Segment

__all__ = ["Kivi", "KiviSegment"]

_FIELDS = ("key_bits", "value_bits", "group", "size", "value_size")
_OF_TOKENS = ("key_codes", "value_codes", "value_step", "value_low")


@dataclass(frozen=True, kw_only=True)
class KiviSegment(Segment):
    """Codes of some lanes.

    Attributes:
        layout: which tokens these are.
        key_bits, value_bits: of the codes.
        group: tokens of a key group.
        size, value_size: d and dv.
        key_codes, value_codes: (m, s, bytes) uint8, packed along the channels.
        key_step, key_low: (m, ceil(s / group), d) of the cache's dtype; with `key_group` (rows, d).
        value_step, value_low: (m, s, dv / value group).
        key_group: (m, s) int32 row of the key steps that each token uses, once tokens have moved; None while slot i is
            in group i // group.
    """

    layout: Layout
    key_bits: int
    value_bits: int
    group: int
    size: int
    value_size: int
    key_codes: Tensor
    key_step: Tensor
    key_low: Tensor
    value_codes: Tensor
    value_step: Tensor
    value_low: Tensor
    key_group: Tensor | None = None
    codec = "kivi"

    def decode(self) -> tuple[Tensor, Tensor]:
        codes = unpack(self.value_codes, self.value_bits, self.value_size)
        return self._decode_keys(), dequantise(codes, self.value_step, self.value_low, -1)

    def _decode_keys(self) -> Tensor:
        codes = unpack(self.key_codes, self.key_bits, self.size)
        if self.key_group is not None:
            row = self.key_group.to(torch.int64)
            return torch.addcmul(self.key_low[row], codes.to(self.key_step.dtype), self.key_step[row])
        slots = self.layout.size
        whole = slots // self.group
        keys = self.key_step.new_empty((self.layout.lanes, slots, self.size))
        split = whole * self.group
        if whole:
            keys[:, :split] = dequantise(codes[:, :split], self.key_step[:, :whole], self.key_low[:, :whole], 1)
        if split < slots:
            keys[:, split:] = dequantise(codes[:, split:], self.key_step[:, whole:], self.key_low[:, whole:], 1)
        return keys

    def rows(self, index: Tensor) -> KiviSegment:
        lanes, layout = self.layout.lanes_of_rows(index)
        lanes = lanes.to(self.key_codes.device)
        codes: dict[str, Any] = {name: getattr(self, name)[lanes] for name in _OF_TOKENS}
        if self.key_group is None:
            return replace(self, layout=layout, key_step=self.key_step[lanes], key_low=self.key_low[lanes], **codes)
        return replace(self, layout=layout, **codes, **self._table(self.key_group[lanes]))

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> KiviSegment:
        codes: dict[str, Any] = {name: getattr(self, name)[lane, slot] for name in _OF_TOKENS}
        if self.key_group is None:
            group = lane * self.key_step.shape[1] + torch.div(slot, self.group, rounding_mode="floor")
        else:
            group = self.key_group[lane, slot]
        return replace(self, layout=layout, **codes, **self._table(group))

    def _table(self, group: Tensor) -> dict[str, Any]:
        """The key steps and minima that tokens of these groups use, and for each token its row among them."""
        used, row = torch.unique(group, return_inverse=True)
        used = used.to(torch.int64)
        return {
            "key_step": self.key_step.reshape(-1, self.size)[used],
            "key_low": self.key_low.reshape(-1, self.size)[used],
            "key_group": row.view_as(group).to(torch.int32),
        }

    def tensors(self) -> dict[str, Tensor]:
        return {**self.state()[1], **self.layout.tensors()}

    def closed_form_bytes(self) -> int:
        slots, element = self.layout.lanes * self.layout.size, self.key_step.element_size()
        codes = packed_size(self.size, self.key_bits) + packed_size(self.value_size, self.value_bits)
        scales = 2 * element * (self.value_size // largest_divisor(self.value_size, self.group))
        if self.key_group is None:
            groups, index = self.layout.lanes * -(-self.layout.size // self.group), 0
        else:
            groups, index = int(self.key_group.max()) + 1, 4 * slots
        return slots * (codes + scales) + index + groups * 2 * element * self.size + self.layout.closed_form_bytes()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields = {name: getattr(self, name) for name in _FIELDS}
        tensors = {name: getattr(self, name) for name in (*_OF_TOKENS, "key_step", "key_low")}
        return dict(fields), tensors if self.key_group is None else {**tensors, "key_group": self.key_group}

    @classmethod
    def from_state(cls, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> KiviSegment:
        return cls(
            layout=layout,
            **{name: int(str(fields[name])) for name in _FIELDS},
            key_codes=tensors["key_codes"],
            key_step=tensors["key_step"],
            key_low=tensors["key_low"],
            value_codes=tensors["value_codes"],
            value_step=tensors["value_step"],
            value_low=tensors["value_low"],
            key_group=tensors.get("key_group"),
        )


@dataclass(frozen=True, kw_only=True)
class Kivi(Codec):
    """Asymmetric codes.

    Args:
        bits: of a code: 2, 4 or 8.
        group: tokens of a key group, and channels of a value group.
        residual: newest tokens in full precision, and tokens encoded at once; a multiple of `group`.
        key_bits: of a key's code, where it is to differ.
        value_bits: of a value's code, where it is to differ.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128
    key_bits: int | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("bits", "key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits not in (2, 4, 8) and not (bits is None and name != "bits"):
                raise ValueError(
                    f"kivi codes have 2, 4 or 8 bits, not {name}={bits}; write {name}=2, {name}=4 or {name}=8"
                )
        if self.group < 2:
            raise ValueError(f"a kivi group has at least 2 values, not {self.group}; the paper's is group=32")
        if self.residual < self.group or self.residual % self.group:
            raise ValueError(
                f"kivi's residual must be a multiple of its group, and residual={self.residual} is none of "
                f"group={self.group}; write residual={max(1, round(self.residual / self.group)) * self.group}"
            )

    @property
    def bits_of_keys(self) -> int:
        """Bits of a key's code."""
        return self.key_bits or self.bits

    @property
    def bits_of_values(self) -> int:
        """Bits of a value's code."""
        return self.value_bits or self.bits

    @property
    def tail(self) -> int:
        """The residual."""
        return self.residual

    @property
    def block(self) -> int:
        """The residual leaves the tail as a whole."""
        return self.residual

    @property
    def lane_multiple(self) -> int:
        """Key groups run along time."""
        return self.group

    def segment_type(self) -> type[KiviSegment]:
        return KiviSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor) -> KiviSegment:
        """Codes of keys (m, s, d) and values (m, s, dv).

        Raises:
            CacheMisuse: NaN or infinity.
        """
        refuse_non_finite("kivi", keys, values, "which no code can hold")
        missing = -keys.shape[1] % self.group
        padded = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], 1) if missing else keys
        key_codes, key_step, key_low = quantise(padded, self.bits_of_keys, 1, self.group)
        if missing:
            key_codes = key_codes[:, : keys.shape[1]].clone(memory_format=torch.contiguous_format)
        value_group = largest_divisor(values.shape[-1], self.group)
        value_codes, value_step, value_low = quantise(values, self.bits_of_values, 2, value_group)
        return KiviSegment(
            layout=layout,
            key_bits=self.bits_of_keys,
            value_bits=self.bits_of_values,
            group=self.group,
            size=keys.shape[-1],
            value_size=values.shape[-1],
            key_codes=pack(key_codes, self.bits_of_keys),
            key_step=key_step,
            key_low=key_low,
            value_codes=pack(value_codes, self.bits_of_values),
            value_step=value_step,
            value_low=value_low,
        )

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Codes, two scales of each key channel shared by a group of tokens, two for each group of value channels."""
        codes = packed_size(key_size, self.bits_of_keys) + packed_size(value_size, self.bits_of_values)
        value_groups = value_size // largest_divisor(value_size, self.group)
        return codes + 2 * element_size * (key_size / self.group + value_groups)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value (less its minimum, divided by the step) and 2 for the step of each group."""
        key_groups = -(-tokens // self.group) * key_size
        value_groups = tokens * (value_size // largest_divisor(value_size, self.group))
        return 2 * (tokens * (key_size + value_size) + key_groups + value_groups)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value: times the step, plus the minimum."""
        return 2 * tokens * (key_size + value_size)
