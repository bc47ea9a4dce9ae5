"""What llama.cpp saves of a sequence: both layouts there and back, and bytes of another layout."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers.ggml_rows import kind_of
from benchmarks.peers.sequence_state import Rows, SequenceState
from kvtailor.errors import KvtailorError

CELLS = 3


def state(kind: str, *, transposed: bool = False) -> SequenceState:
    generator = torch.Generator().manual_seed(1)

    def rows() -> Rows:
        return Rows(kind=kind_of(kind), data=kind_of(kind).encode(torch.randn(CELLS, 64, generator=generator)))

    return SequenceState(
        magic=0xAF143CD8,
        positions=torch.tensor([4, 5, 9], dtype=torch.int32),
        keys=[rows(), rows()],
        values=[rows(), rows()],
        transposed=transposed,
    )


@pytest.mark.parametrize(("kind", "transposed"), [("q4_0", False), ("f16", False), ("f16", True)])
def test_there_and_back(kind: str, transposed: bool) -> None:
    given = state(kind, transposed=transposed)
    back = SequenceState.parse(given.pack().tobytes())
    assert back.magic == given.magic and back.transposed == transposed
    assert back.positions.tolist() == [4, 5, 9]
    for side, other in zip((*back.keys, *back.values), (*given.keys, *given.values), strict=True):
        assert side.kind is other.kind and torch.equal(side.data, other.data)
    row = {"q4_0": 36, "f16": 128}[kind]
    assert back.row_bytes == 4 * row and back.held_bytes == CELLS * 4 * row


def test_transposed_values_lie_by_channel() -> None:
    given = state("f16", transposed=True)
    last = given.values[-1].data.view(torch.float16)
    tail = torch.frombuffer(bytearray(given.pack().tobytes()[-CELLS * 2 :]), dtype=torch.float16)
    assert torch.equal(tail, last[:, -1])


def test_bytes_of_another_layout_are_refused() -> None:
    good = state("q8_0").pack().tobytes()
    with pytest.raises(KvtailorError, match="end too early"):
        SequenceState.parse(good[:-1])
    with pytest.raises(KvtailorError, match="layout has changed"):
        SequenceState.parse(good + b"\0")
    with pytest.raises(KvtailorError, match="2 streams"):
        SequenceState.parse(good[:8] + (2).to_bytes(4, "little") + good[12:])
    with pytest.raises(KvtailorError, match="several sequences"):
        SequenceState.parse(good[:20] + (2).to_bytes(4, "little") + good[24:])


def test_every_cell_needs_its_rows() -> None:
    given = state("f16")
    few = SequenceState(magic=1, positions=given.positions[:2], keys=given.keys, values=given.values)
    with pytest.raises(KvtailorError, match="asked for 2 cells with rows of shape"):
        few.pack()
