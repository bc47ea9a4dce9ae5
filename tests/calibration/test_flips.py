"""A calibration file in which a bit has flipped is refused, or says what it said before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvtailor import calibration_file
from kvtailor.calibration_file import shipped
from kvtailor.errors import ArgumentError

FLIPS = 200


@pytest.mark.filterwarnings("error")
def test_no_flip_in_a_calibration_file_is_read_as_other_content(tmp_path: Path) -> None:
    """Half of the flips hit the header, which is a small part of the file."""
    whole = min(shipped(), key=lambda each: sum(t.numel() for t in each.tensors.values()))
    path = tmp_path / "flipped.safetensors"
    calibration_file.write(path, whole.tensors, whole.metadata)
    data, draw = path.read_bytes(), random.Random(5)
    header = 8 + int.from_bytes(data[:8], "little")
    assert calibration_file.read(str(path), whole.kind, "x: file").tensors.keys() == whole.tensors.keys()
    refused = 0
    for turn in range(FLIPS):
        changed = bytearray(data)
        changed[draw.randrange(header if turn % 2 else len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            found = calibration_file.read(str(path), whole.kind, "x: file")
        except ArgumentError:
            refused += 1
            continue
        assert found.metadata == whole.metadata
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in whole.tensors.items())
    assert refused > 0.9 * FLIPS
