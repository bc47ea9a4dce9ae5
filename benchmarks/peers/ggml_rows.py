"""Rows of keys and values as ggml stores them: the bytes of its types `f32`, `f16`, `bf16`, `q8_0` and `q4_0`.

`q8_0` and `q4_0` cut a row into blocks of 32 numbers. A block begins with its step in float16:

- `q8_0`: then 32 signed bytes; a number is step x byte (34 bytes, 8.5 bits a number).
- `q4_0`: then 16 bytes, of which byte i holds number i below and number i + 16 above; a number is step x (code - 8).
  The number of largest magnitude becomes code 0, so the step has the opposite sign of it (18 bytes, 4.5 bits a number).

Source: `ggml/src/ggml-quants.c` of llama.cpp, functions `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref`. The tests
compare the bytes with those of the package `gguf` and with those that llama.cpp itself writes, where these are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.errors import KvtailorError, UnknownName

__all__ = ["BLOCK", "KINDS", "RowKind", "kind_of", "kind_of_number"]

BLOCK = 32
"""Numbers of a block of `q8_0` and `q4_0`."""


@dataclass(frozen=True, kw_only=True)
class RowKind:
    """One of ggml's types, as a cache may hold it.

    Attributes:
        name: as llama.cpp prints it.
        number: of ggml's `enum ggml_type`, which is part of its file formats.
        quantised: rows are made of blocks of `BLOCK` numbers.
        encode: numbers (..., c) float32 -> bytes (..., row) uint8.
        decode: bytes (..., row) uint8 -> numbers (..., c) float32.
    """

    name: str
    number: int
    quantised: bool
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]

    def row_bytes(self, numbers: int) -> int:
        """Return the bytes of a row of so many numbers."""
        return int(self.encode(torch.zeros(1, numbers)).shape[-1])

    def element_bytes(self) -> int:
        """Return the bytes of one number.

        Raises:
            KvtailorError: numbers are in blocks, so that one has no bytes of its own.
        """
        if self.quantised:
            raise KvtailorError(f"asked for the bytes of one number of {self.name}, which is made of blocks of {BLOCK}")
        return self.row_bytes(1)


def kind_of(name: str) -> RowKind:
    """Return the kind of a name.

    Raises:
        UnknownName: there is none of that name here.
    """
    if name not in KINDS:
        raise UnknownName("type of ggml", name, KINDS)
    return KINDS[name]


def kind_of_number(number: int) -> RowKind:
    """Return the kind of one of ggml's numbers.

    Raises:
        KvtailorError: it is a type that is not known here.
    """
    for kind in KINDS.values():
        if kind.number == number:
            return kind
    known = ", ".join(f"{kind.number} ({kind.name})" for kind in KINDS.values())
    raise KvtailorError(f"found rows of ggml's type {number}, but only {known} can be read: use one of these caches")


def _blocks(numbers: Tensor) -> Tensor:
    size = numbers.shape[-1]
    if size % BLOCK:
        raise KvtailorError(f"asked for blocks of {BLOCK} in rows of {size} numbers: give a multiple of {BLOCK}")
    blocks: Tensor = numbers.float().unflatten(-1, (-1, BLOCK))
    return blocks


def _bytes_of(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _inverse(step: Tensor) -> Tensor:
    """1 / step in float32, 0 where a block is all zeros."""
    return torch.where(step == 0, torch.zeros_like(step), 1 / step)


def _to_q8_0(numbers: Tensor) -> Tensor:
    blocks = _blocks(numbers)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks * _inverse(step)).round().to(torch.int8)
    return torch.cat([_bytes_of(step.half()), codes.view(torch.uint8)], -1).flatten(-2)


def _from_q8_0(rows: Tensor) -> Tensor:
    blocks = rows.unflatten(-1, (-1, 2 + BLOCK))
    step = blocks[..., :2].contiguous().view(torch.float16).float()
    numbers: Tensor = blocks[..., 2:].contiguous().view(torch.int8).float() * step
    return numbers.flatten(-2)


def _to_q4_0(numbers: Tensor) -> Tensor:
    blocks = _blocks(numbers)
    # The number of largest magnitude with its sign; the first of several.
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    step = largest / -8
    codes = (blocks * _inverse(step) + 8.5).to(torch.uint8).clamp_max(15)
    below, above = codes.chunk(2, -1)
    return torch.cat([_bytes_of(step.half()), below | above << 4], -1).flatten(-2)


def _from_q4_0(rows: Tensor) -> Tensor:
    blocks = rows.unflatten(-1, (-1, 2 + BLOCK // 2))
    step = blocks[..., :2].contiguous().view(torch.float16).float()
    codes = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1)
    numbers: Tensor = (codes.float() - 8) * step
    return numbers.flatten(-2)


def _plain(name: str, number: int, dtype: torch.dtype) -> RowKind:
    return RowKind(
        name=name,
        number=number,
        quantised=False,
        encode=lambda numbers: _bytes_of(numbers.to(dtype)),
        decode=lambda rows: rows.contiguous().view(dtype).float(),
    )


KINDS: dict[str, RowKind] = {
    "f32": _plain("f32", 0, torch.float32),
    "f16": _plain("f16", 1, torch.float16),
    "bf16": _plain("bf16", 30, torch.bfloat16),
    "q8_0": RowKind(name="q8_0", number=8, quantised=True, encode=_to_q8_0, decode=_from_q8_0),
    "q4_0": RowKind(name="q4_0", number=2, quantised=True, encode=_to_q4_0, decode=_from_q4_0),
}
"""By name, those that llama.cpp's cache is measured with."""
