"""The encodings of one side: codes with scales for tokens, for channels of a run of tokens, and 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.coded import Coded, TimeGrouped
from kvtailor.ops.quant import (
    MOST_E4M3,
    dequantise,
    from_e4m3,
    pack,
    packed_size,
    quantise,
    quantise_symmetric,
    scale_to,
    to_e4m3,
    unpack,
)

__all__ = ["ChannelCodes", "FloatCodes", "TokenCodes", "padded_groups"]


@dataclass(frozen=True, kw_only=True)
class TokenCodes(Coded):
    """Codes whose scales are shared by channels of one token.

    Attributes:
        bits: of a code.
        size: c.
        codes: (m, s, bytes) uint8, packed along the channels.
        step: (m, s, c / group) of the cache's dtype.
        low: as `step`; None where codes are symmetric around zero.
    """

    bits: int
    size: int
    codes: Tensor
    step: Tensor
    low: Tensor | None = None
    of_tokens = ("codes", "step", "low")

    @classmethod
    def of(cls, states: Tensor, bits: int, group: int) -> TokenCodes:
        """Asymmetric codes of states (m, s, c), `group` channels to a scale and a minimum."""
        codes, step, low = quantise(states, bits, 2, group)
        return cls(bits=bits, size=states.shape[-1], codes=pack(codes, bits), step=step, low=low)

    @classmethod
    def symmetric(cls, states: Tensor, bits: int) -> TokenCodes:
        """Symmetric codes of states (m, s, c), one scale to a token."""
        codes, step = quantise_symmetric(states, bits)
        return cls(bits=bits, size=states.shape[-1], codes=pack(codes, bits), step=step)

    def decode(self) -> Tensor:
        codes = unpack(self.codes, self.bits, self.size)
        return dequantise(codes, self.step, self.low, -1, zero=2 ** (self.bits - 1) - 1)

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        scales = (1 if self.low is None else 2) * self.step.shape[-1] * self.step.element_size()
        return lanes * slots * (packed_size(self.size, self.bits) + scales)


@dataclass(frozen=True, kw_only=True)
class ChannelCodes(TimeGrouped):
    """Codes whose scales are shared by a run of tokens within each channel.

    Attributes:
        bits: of a code.
        size: c.
        codes: (m, s, bytes) uint8, packed along the channels.
        step, low: (m, ceil(s / group), c) of the cache's dtype; with `row` (rows, c).
    """

    bits: int
    size: int
    codes: Tensor
    step: Tensor
    low: Tensor
    of_tokens = ("codes",)
    shared = ("step", "low")

    @classmethod
    def of(cls, states: Tensor, bits: int, group: int) -> ChannelCodes:
        """Asymmetric codes of states (m, s, c), `group` tokens to a scale and a minimum."""
        slots = states.shape[1]
        codes, step, low = quantise(padded_groups(states, group), bits, 1, group)
        if codes.shape[1] > slots:
            codes = codes[:, :slots].clone(memory_format=torch.contiguous_format)
        size = states.shape[-1]
        return cls(group=group, bits=bits, size=size, codes=pack(codes, bits), step=step, low=low)

    def decode(self) -> Tensor:
        codes = unpack(self.codes, self.bits, self.size)
        if self.row is not None:
            return torch.addcmul(self.per_token("low"), codes.to(self.step.dtype), self.per_token("step"))
        slots = codes.shape[1]
        whole = slots // self.group
        split = whole * self.group
        if split == slots:
            return dequantise(codes, self.step, self.low, 1)
        states = self.step.new_empty(codes.shape)
        if whole:
            states[:, :split] = dequantise(codes[:, :split], self.step[:, :whole], self.low[:, :whole], 1)
        states[:, split:] = dequantise(codes[:, split:], self.step[:, whole:], self.low[:, whole:], 1)
        return states

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        scales = self.groups(lanes, slots) * 2 * self.size * self.step.element_size()
        return lanes * slots * packed_size(self.size, self.bits) + scales + self.index_bytes(lanes, slots)


@dataclass(frozen=True, kw_only=True)
class FloatCodes(TimeGrouped):
    """8-bit floats (e4m3) with one scale for a run of tokens.

    Attributes:
        codes: (m, s, c) uint8.
        scale: (m, ceil(s / group), 1) of the cache's dtype; with `row` (rows, 1).
    """

    codes: Tensor
    scale: Tensor
    of_tokens = ("codes",)
    shared = ("scale",)

    @classmethod
    def of(cls, states: Tensor, group: int) -> FloatCodes:
        """Floats of states (m, s, c), `group` tokens to a scale."""
        grouped = padded_groups(states, group).unflatten(1, (-1, group))
        scale = scale_to(grouped.abs().amax((2, 3))[..., None], MOST_E4M3)
        codes = to_e4m3(grouped.float() / scale.float()[..., None]).flatten(1, 2)
        if codes.shape[1] > states.shape[1]:
            codes = codes[:, : states.shape[1]].clone(memory_format=torch.contiguous_format)
        return cls(group=group, codes=codes, scale=scale)

    def decode(self) -> Tensor:
        return from_e4m3(self.codes, self.per_token("scale")[:, : self.codes.shape[1]])

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        scales = self.groups(lanes, slots) * self.scale.element_size()
        return lanes * slots * self.codes.shape[-1] + scales + self.index_bytes(lanes, slots)


def padded_groups(states: Tensor, group: int) -> Tensor:
    """States (m, s, c) with the last token repeated until `group` divides the slots; it widens no group."""
    missing = -states.shape[1] % group
    return torch.cat([states, states[:, -1:].expand(-1, missing, -1)], 1) if missing else states
