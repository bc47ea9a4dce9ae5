"""What llama.cpp saves of one sequence: the rows of its cache, read from those bytes and written into them.

`llama_state_seq_get_data` gives, in little-endian order:

    magic u32, sequence i32, streams u32 (1), cells u32,
    for each cell: position i32, number of sequences u32 (1), sequence i32,
    values transposed u32, layers u32,
    for each layer its keys:   type i32, bytes of a row u64, cells x row bytes,
    for each layer its values: the same; or, transposed, type i32, bytes of an element u32, elements of a row u32,
                               elements x cells x bytes of an element.

Values are transposed where flash attention is off. The bytes of a cell of the cache are read here, from llama.cpp's own
answer, and caches are filled here with a context whose prompt would take minutes.

Source: `src/llama-kv-cache.cpp` of llama.cpp (`state_write`, `state_write_meta`, `state_write_data`). The layout is not
promised to stay, so everything is checked, and bytes that are left over are an error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.peers.ggml_rows import RowKind, kind_of_number
from kvtailor.errors import KvtailorError

__all__ = ["Rows", "SequenceState"]

_HEAD = struct.Struct("<IiII")
_CELL = numpy.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_OF_DATA = struct.Struct("<II")
_OF_ROWS = struct.Struct("<iQ")
_OF_COLUMNS = struct.Struct("<iII")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The keys, or the values, of one layer.

    Attributes:
        kind: their type.
        data: (cells, bytes of a row) uint8.
    """

    kind: RowKind
    data: Tensor


@dataclass(frozen=True, kw_only=True)
class SequenceState:
    """A sequence as llama.cpp saves it.

    Attributes:
        magic: the number that llama.cpp begins with.
        positions: (cells,) int32.
        keys: of each layer.
        values: of each layer.
        transposed: llama.cpp keeps the values of a channel together, and not those of a token.
    """

    magic: int
    positions: Tensor
    keys: Sequence[Rows]
    values: Sequence[Rows]
    transposed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell: of its rows in all layers."""
        return sum(rows.data.shape[1] for rows in (*self.keys, *self.values))

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows of all cells."""
        return sum(rows.data.numel() for rows in (*self.keys, *self.values))

    @classmethod
    def parse(cls, data: bytes) -> SequenceState:
        """Return the state that these bytes are.

        Raises:
            KvtailorError: the bytes have another layout than the one of the module's docstring.
        """
        try:
            return cls._parse(data)
        except (struct.error, ValueError) as error:
            raise KvtailorError(
                f"asked to read a sequence of llama.cpp from {len(data):,} bytes, which end too early ({error}): its "
                "layout has changed, see benchmarks/peers/sequence_state.py"
            ) from error

    @classmethod
    def _parse(cls, data: bytes) -> SequenceState:
        magic, _, streams, cells = _HEAD.unpack_from(data)
        if streams != 1:
            raise KvtailorError(f"found a state of {streams} streams: give a cache of one sequence")
        of_cells = numpy.frombuffer(data, _CELL, cells, _HEAD.size)
        at = _HEAD.size + of_cells.nbytes
        transposed, layers = _OF_DATA.unpack_from(data, at)
        at += _OF_DATA.size
        if not (of_cells["sequences"] == 1).all():
            raise KvtailorError("found a state of llama.cpp with cells of several sequences: use one sequence")
        read: list[Rows] = []
        for side in range(2 * layers):
            in_columns = bool(transposed) and side >= layers
            if in_columns:
                number, element, width = _OF_COLUMNS.unpack_from(data, at)
                at, size = at + _OF_COLUMNS.size, element * width
            else:
                number, size = _OF_ROWS.unpack_from(data, at)
                at += _OF_ROWS.size
            raw = numpy.frombuffer(data, numpy.uint8, cells * size, at)
            at += raw.nbytes
            if in_columns:
                # (elements, cells, bytes of an element) -> (cells, bytes of a row)
                raw = raw.reshape(width, cells, element).swapaxes(0, 1)
            rows = torch.from_numpy(raw.reshape(cells, size).copy())
            read.append(Rows(kind=kind_of_number(number), data=rows))
        if at != len(data):
            raise KvtailorError(
                f"read {at:,} of the {len(data):,} bytes of a state of llama.cpp: its layout has changed, see "
                "benchmarks/peers/sequence_state.py"
            )
        positions = torch.from_numpy(of_cells["position"].astype(numpy.int32))
        return cls(
            magic=magic,
            positions=positions,
            keys=read[:layers],
            values=read[layers:],
            transposed=bool(transposed),
        )

    def pack(self) -> numpy.ndarray[Any, Any]:
        """Return the bytes as llama.cpp reads them, as an array of uint8."""
        cells = numpy.empty(self.positions.numel(), _CELL)
        cells["position"], cells["sequences"], cells["sequence"] = self.positions.numpy(), 1, 0
        head = [_HEAD.pack(self.magic, 0, 1, cells.size), cells.tobytes()]
        head.append(_OF_DATA.pack(int(self.transposed), len(self.keys)))
        arrays = [numpy.frombuffer(b"".join(head), numpy.uint8)]
        for side, rows in enumerate((*self.keys, *self.values)):
            found, number = tuple(rows.data.shape), rows.kind.number
            if found[0] != cells.size:
                raise KvtailorError(f"asked for {cells.size} cells with rows of shape {found}: give a row to each cell")
            data = rows.data.contiguous().numpy()
            if self.transposed and side >= len(self.keys):
                element = rows.kind.element_bytes()
                before = _OF_COLUMNS.pack(number, element, found[1] // element)
                data = data.reshape(cells.size, -1, element).swapaxes(0, 1)
            else:
                before = _OF_ROWS.pack(number, found[1])
            arrays += [numpy.frombuffer(before, numpy.uint8), data.reshape(-1)]
        return numpy.concatenate(arrays)
