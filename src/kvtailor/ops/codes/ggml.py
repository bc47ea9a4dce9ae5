"""The block formats in which llama.cpp (ggml) holds a quantised cache: 32 channels to a step in float16.

| format | a number is | codes | a block has |
|---|---|---|---|
| q8_0 | step x code | -127 to 127 | a step |
| q5_0, q4_0 | step x code | -16 to 15, -8 to 7 | a step; the number of largest magnitude has the least code |
| q5_1, q4_1 | minimum + step x code | 0 to 31, 0 to 15 | a step and a minimum |

Codes are made with the step in float32, and numbers with the step in float16 that is stored. Halves are rounded up (of
q8_0 away from zero). This is the arithmetic of the functions `quantize_row_*_ref` of llama.cpp's `ggml-quants.c`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.quant import pack, packed_size, unpack
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded

__all__ = ["BLOCK", "FORMATS", "BlockFormat", "GgmlCodes"]

BLOCK = 32
"""Channels of a block."""
# Elements that are worked on at once.
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """One of ggml's formats.

    Attributes:
        bits: of a code.
        zero: the code as it is stored that stands for zero; None where a block has a minimum.
    """

    bits: int
    zero: int | None

    def bytes_of(self, size: int) -> int:
        """Return the bytes of one token of `size` channels: codes, and a step for each block, and a minimum."""
        return packed_size(size, self.bits) + -(-size // BLOCK) * (2 if self.zero is not None else 4)


FORMATS = {
    "q8_0": BlockFormat(bits=8, zero=128),
    "q5_1": BlockFormat(bits=5, zero=None),
    "q5_0": BlockFormat(bits=5, zero=16),
    "q4_1": BlockFormat(bits=4, zero=None),
    "q4_0": BlockFormat(bits=4, zero=8),
}
"""The formats by ggml's names."""


@dataclass(frozen=True, kw_only=True)
class GgmlCodes(Coded):
    """Numbers in one of ggml's formats.

    Attributes:
        format: one of `FORMATS`.
        size: c.
        dtype: name of the cache's dtype, for instance "bfloat16".
        codes: (m, s, bytes) uint8, packed along the channels.
        step: (m, s, ceil(c / 32)) float16.
        low: as `step`; None where the format has no minimum.
    """

    format: str
    size: int
    dtype: str
    codes: Tensor
    step: Tensor
    low: Tensor | None = None
    of_tokens = ("codes", "step", "low")
    dtypes = {"step": (torch.float16,), "low": (torch.float16,)}

    @cached_property
    def code_layout(self) -> CodeLayout | None:
        if self.size % BLOCK:
            return None
        kind = FORMATS[self.format]
        return CodeLayout(
            kind=CodeKind.TOKENS,
            codes=self.codes,
            size=self.size,
            # The tables' own 16 bits, but for a cache in float32, whose products are exact.
            dtype=torch.float32 if self.dtype == "float32" else self.step.dtype,
            bits=kind.bits,
            step=self.step,
            low=self.low,
            zero=kind.zero or 0,
            steps="0 and more" if kind.zero is None or kind.bits == 8 else "any",
            block=BLOCK,
        )

    @classmethod
    def of(cls, states: Tensor, format: str) -> GgmlCodes:
        """Codes of finite states (m, s, c); the last block of a token has what channels are left."""
        lanes, slots, size = states.shape
        kind, blocks = FORMATS[format], -(-size // BLOCK)
        codes = torch.zeros((lanes, slots, packed_size(size, kind.bits)), dtype=torch.uint8, device=states.device)
        step = torch.zeros((lanes, slots, blocks), dtype=torch.float16, device=states.device)
        low = torch.zeros_like(step) if kind.zero is None else None
        for at in pieces(lanes, slots, size, _PIECE):
            part = states[at].float()
            missing = blocks * BLOCK - size
            # The last channel once more: it makes no block's range wider.
            wide = torch.cat([part, part[..., -1:].expand(*part.shape[:2], missing)], -1) if missing else part
            found, exact, least = _coded(wide.unflatten(-1, (blocks, BLOCK)), kind)
            codes[at] = pack(found.flatten(-2)[..., :size], kind.bits)
            step[at] = _halves(exact)
            if low is not None and least is not None:
                low[at] = _halves(least)
        name = str(states.dtype).removeprefix("torch.")
        return cls(format=format, size=size, dtype=name, codes=codes, step=step, low=low)

    def decode(self) -> Tensor:
        kind, (lanes, slots) = FORMATS[self.format], self.codes.shape[:2]
        like = self.codes.new_empty((), dtype=getattr(torch, self.dtype))
        states = huge_pages.read_buffer(like, (lanes, slots, self.size))
        for at in pieces(lanes, slots, self.size, _PIECE):
            numbers = unpack(self.codes[at], kind.bits, self.size).float().sub_(kind.zero or 0)
            numbers = numbers.mul_(self._by_channel(self.step[at]))
            if self.low is not None:
                numbers = numbers.add_(self._by_channel(self.low[at]))
            states[at] = numbers.to(states.dtype)
        return states

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return lanes * slots * FORMATS[self.format].bytes_of(self.size)

    def _by_channel(self, of_blocks: Tensor) -> Tensor:
        return of_blocks.float().repeat_interleave(BLOCK, -1)[..., : self.size]


def _coded(blocks: Tensor, kind: BlockFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (..., 32) uint8 of blocks, with their steps (...) and minima in float32."""
    most = 2**kind.bits - 1
    if kind.zero is None:
        least, largest = blocks.aminmax(dim=-1)
        step = (largest - least) / most
        codes = (blocks - least[..., None]) * _inverse(step)[..., None] + 0.5
        return codes.to(torch.uint8).clamp_(max=most), step, least
    if kind.bits == 8:
        step = blocks.abs().amax(-1) / 127
        numbers = blocks * _inverse(step)[..., None]
        rounded = (numbers.abs() + 0.5).floor_().copysign_(numbers)
        return rounded.add_(kind.zero).to(torch.uint8), step, None
    # The number of largest magnitude with its sign, the first of several, becomes the least code.
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
    step = largest / -kind.zero
    codes = blocks * _inverse(step)[..., None] + (kind.zero + 0.5)
    return codes.to(torch.uint8).clamp_(max=most), step, None


def _inverse(step: Tensor) -> Tensor:
    """1 / step, 0 where a block is all alike."""
    return torch.where(step == 0, torch.zeros_like(step), 1 / step)


def _halves(numbers: Tensor) -> Tensor:
    """In float16; what is larger than its largest becomes that one, so that no code stands for infinity."""
    most = torch.finfo(torch.float16).max
    return numbers.clamp(-most, most).half()
