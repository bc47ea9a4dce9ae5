"""The checksum is zlib's, whoever computes it."""

from __future__ import annotations

import zlib

import pytest
import torch
from tests.ops.cpu.coded_layouts import every_variant

from kvtailor.ops.cpu.checksum import crc32
from kvtailor.ops.cpu.library import Library


@every_variant
def test_it_is_zlibs_at_every_size_and_place(library: Library) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 1000, 4097, 100_003):
        for first in (0, 1, 3):
            data = torch.randint(0, 256, (size + first,), dtype=torch.uint8, generator=generator)[first:]
            for value in (0, 1, 12345, 0xFFFFFFFF):
                assert crc32(data, value, using=library) == zlib.crc32(data.numpy().data, value), (size, first, value)


@every_variant
def test_pieces_give_what_the_whole_gives_and_a_flipped_bit_does_not(library: Library) -> None:
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    whole = crc32(data, using=library)
    assert crc32(data[777:], crc32(data[:777], using=library), using=library) == whole
    for place in (0, 63, 64, 2500, 4990, 4999):
        broken = data.clone()
        broken[place] ^= 16
        assert crc32(broken, using=library) != whole


def test_without_the_extension_it_is_zlibs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtailor.ops.cpu.checksum.library", lambda: None)
    data = torch.arange(200, dtype=torch.uint8)
    assert crc32(data) == zlib.crc32(data.numpy().data)
