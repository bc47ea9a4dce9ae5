"""The encodings of one side: codes with scales for tokens, for channels of a run of tokens, and 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.quant import (
    FLAT,
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
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded, TimeGrouped

__all__ = ["ChannelCodes", "FloatCodes", "TokenCodes", "decoded_channels", "padded_groups"]

# Elements that are decoded at once on a CPU. Whole tensors of codes, casts and sums are page-faulted anew at every
# token: keys of 8 heads x 8192 x 128 in 4 bits took 27 ms that way and take 10, values 44 ms and 15 (one thread).
_PIECE = 1 << 20


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

    @cached_property
    def code_layout(self) -> CodeLayout:
        return CodeLayout(
            kind=CodeKind.TOKENS,
            codes=self.codes,
            size=self.size,
            dtype=self.step.dtype,
            bits=self.bits,
            step=self.step,
            low=self.low,
            zero=self._zero,
            block=self.size // self.step.shape[-1],
        )

    @property
    def _zero(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.low is None else 0

    def decode(self) -> Tensor:
        zero = self._zero
        if self.codes.device.type != "cpu":
            return dequantise(unpack(self.codes, self.bits, self.size), self.step, self.low, -1, zero=zero)
        groups = self.step.shape[-1]
        states = huge_pages.read_buffer(self.step, (*self.codes.shape[:2], self.size))
        lanes, slots, size = states.shape
        for at in pieces(lanes, slots, size, _PIECE):
            piece = states[at].copy_(unpack(self.codes[at], self.bits, self.size)).unflatten(-1, (groups, -1))
            if self.low is None:
                piece.sub_(zero).mul_(self.step[at][..., None])
                continue
            # Written out, since one operation that broadcasts within a row takes seven times as long.
            low, step = (x[at][..., None].expand_as(piece).contiguous() for x in (self.low, self.step))
            torch.addcmul(low, piece, step, out=piece)
        return states

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

    @cached_property
    def code_layout(self) -> CodeLayout:
        return CodeLayout(
            kind=CodeKind.CHANNELS,
            codes=self.codes,
            size=self.size,
            dtype=self.step.dtype,
            bits=self.bits,
            step=self.step,
            low=self.low,
            row=self.row,
            group=self.group,
        )

    def decode(self) -> Tensor:
        return decoded_channels(self, lambda codes: unpack(codes, self.bits, self.size))

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

    @classmethod
    def scaled(cls, states: Tensor, group: int, scale: Tensor) -> FloatCodes:
        """Floats of states (m, s, c) in scales (m,) that are given; larger magnitudes become 448 scales.

        Each stands beside every run of `group` tokens, in the cache's dtype, to which it is rounded before it is used.
        """
        own = scale.to(states.dtype)
        own = torch.where(own > 0, own, torch.full_like(own, FLAT))[:, None, None]
        codes = to_e4m3(states.float() / own.float())
        return cls(group=group, codes=codes, scale=own.repeat(1, -(-states.shape[1] // group), 1))

    @cached_property
    def code_layout(self) -> CodeLayout:
        size = self.codes.shape[-1]
        return CodeLayout(
            kind=CodeKind.FLOATS,
            codes=self.codes,
            size=size,
            dtype=self.scale.dtype,
            bits=8,
            step=self.scale,
            row=self.row,
            group=self.group,
            block=size,
            element="e4m3",
        )

    def decode(self) -> Tensor:
        return from_e4m3(self.codes, self.per_token("scale")[:, : self.codes.shape[1]])

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        scales = self.groups(lanes, slots) * self.scale.element_size()
        return lanes * slots * self.codes.shape[-1] + scales + self.index_bytes(lanes, slots)


class ChannelScales(Protocol):
    """What `decoded_channels` reads of a side: see `ChannelCodes`."""

    @property
    def size(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def codes(self) -> Tensor: ...

    @property
    def step(self) -> Tensor: ...

    @property
    def low(self) -> Tensor: ...

    @property
    def row(self) -> Tensor | None: ...


def decoded_channels(side: ChannelScales, unpacked: Callable[[Tensor], Tensor]) -> Tensor:
    """(m, s, c) of codes whose steps and minima are shared by runs of tokens; `unpacked` makes codes of bytes."""
    states = huge_pages.read_buffer(side.step, (*side.codes.shape[:2], side.size))
    most = _PIECE if side.codes.device.type == "cpu" else max(1, states.numel())
    lanes, slots, size = states.shape
    for lane, slot in pieces(lanes, slots, size, most, multiple=side.group):
        piece = states[lane, slot].copy_(unpacked(side.codes[lane, slot]))
        if side.row is not None:
            row = side.row[lane, slot].to(torch.int64)
            torch.addcmul(side.low[row], piece, side.step[row], out=piece)
            continue
        first, count = slot.start // side.group, piece.shape[1] // side.group
        split = count * side.group
        for end, part in ((first + count, piece[:, :split]), (first + count + 1, piece[:, split:])):
            if part.shape[1]:
                grouped = part.unflatten(1, (end - first, -1))
                low, step = (x[lane, first:end, None] for x in (side.low, side.step))
                # One operation, so that 16-bit dtypes round once and code * step cannot overflow before the sum.
                torch.addcmul(low, grouped, step, out=grouped)
            first = end
    return states


def padded_groups(states: Tensor, group: int) -> Tensor:
    """States (m, s, c) with the last token repeated until `group` divides the slots; it widens no group."""
    missing = -states.shape[1] % group
    return torch.cat([states, states[:, -1:].expand(-1, missing, -1)], 1) if missing else states
