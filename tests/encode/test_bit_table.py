"""Bits that differ between layers, in the paper's words and as a table."""

from __future__ import annotations

import pytest

from kvtailor.encode.bit_table import BitTable
from kvtailor.encode.contract import CodecContext
from kvtailor.encode.fp8 import Fp8
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.vector import Vector
from kvtailor.plan import Plan


def bits(codec: BitTable, layers: int) -> list[tuple[int | None, int | None]]:
    each = [codec.for_layer(CodecContext(layer=layer, layers=layers)) for layer in range(layers)]
    assert all(type(one) is type(codec.of) for one in each)
    return [(one.key_bits, one.value_bits) for one in each]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"keys": 2, "values": 1}, [(2, 2), (2, 1), (1, 1), (1, 1)]),
        ({"keys": 0.5, "values": 0.0}, [(2, 1), (2, 1), (1, 1), (1, 1)]),
        ({"keys": 1.0, "values": 0.25, "high": 4, "low": 2}, [(4, 4), (4, 2), (4, 2), (4, 2)]),
        ({"keys": (8, 4, 4, 2), "values": 0}, [(8, 1), (4, 1), (4, 1), (2, 1)]),
        ({"keys": (8, 4, 4, 2), "values": (4, 3, 2, 1)}, [(8, 4), (4, 3), (4, 2), (2, 1)]),
    ],
)
def test_each_layer_gets_its_bits(given: dict, expected: list) -> None:
    assert bits(BitTable(of=Kivi(group=16), **given), 4) == expected


def test_no_layers_are_the_same_plan_however_they_are_written() -> None:
    texts = ("bit_table(of=kivi, keys=0, values=0)", "bit_table(of=kivi, keys=0.0)")
    assert Plan.parse(texts[0]).hash == Plan.parse(texts[1]).hash
    assert Plan.parse("bit_table(of=kivi, keys=1)").hash != Plan.parse("bit_table(of=kivi, keys=1.0)").hash


def test_the_papers_example_is_three_quarters_in_one_bit() -> None:
    """AsymKV-16/0 on 32 layers: 16 of the 64 key and value matrices have 2 bits, the others 1."""
    table = bits(BitTable(of=Kivi(), keys=16, values=0), 32)
    assert sum(each == 1 for pair in table for each in pair) == 48 == 0.75 * 64
    assert bits(Plan.parse("asymkv1").encode, 32) == table


def test_bytes_are_the_mean_over_layers() -> None:
    """2 and 1 bits, groups of 32, 16-bit scales: 0.375 and 0.25 bytes for each element."""
    codec = BitTable(of=Kivi(), keys=1, values=0)
    assert codec.mean_bytes_per_token(2, 64, 64, 2) == (0.375 + 3 * 0.25) * 64 / 2
    with pytest.raises(ValueError, match="bit_table: the bits depend on the layer"):
        codec.bytes_per_token(64, 64, 2)


def test_what_the_model_lacks_is_said() -> None:
    size = {"heads": 2, "size": 64}
    assert BitTable(of=Kivi(), keys=3).misfit(layers=4, **size) is None
    assert "keys counts 5 layers; the plan compresses 4" in str(BitTable(of=Kivi(), keys=5).misfit(layers=4, **size))
    listed = BitTable(of=Kivi(), values=(2, 1, 1)).misfit(layers=4, **size)
    assert "values has bits for 3 layers; the plan compresses 4" in str(listed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BitTable(of=Fp8()),
            "bit_table: of must be a codec with key_bits and value_bits such as kivi, found Fp8",
        ),
        (lambda: BitTable(of=Kivi(), keys=1.5), "bit_table: keys must be a share from 0.0 to 1.0, found 1.5"),
        (lambda: BitTable(of=Kivi(), values=-1), "bit_table: values must be 0 layers or more, found -1"),
        (lambda: BitTable(of=Kivi(), high=9), "kivi: key_bits must be 1 to 8, found 9"),
        (lambda: BitTable(of=Vector()), "vector: key_bits must be 2 to 8, found 1"),
    ],
)
def test_bad_numbers_say_what_to_write(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()
