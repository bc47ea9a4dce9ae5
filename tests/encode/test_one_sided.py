"""A codec made one of keys or of values alone, whatever it is around."""

from __future__ import annotations

import pytest

from kvtailor.encode.contract import Codec
from kvtailor.plan import Plan

# A codec as a plan writes it, and what it is of keys alone and of values alone; None: nothing is left to code.
CASES = [
    ("plain", "plain", "plain"),
    ("indexed", "indexed", "indexed"),
    ("kivi(bits=4)", "kivi(bits=4, only=keys)", "kivi(bits=4, only=values)"),
    ("vector(only=keys)", "vector(only=keys)", None),
    ("fp8(only=values)", None, "fp8(only=values)"),
    ("channels(keep=0.5)", None, None),
    ("hadamard(of=fp8)", "hadamard(of=fp8(only=keys), only=keys)", "hadamard(of=fp8(only=values), only=values)"),
    (
        "hadamard(of=fp8, only=keys)",
        "hadamard(of=fp8(only=keys), only=keys)",
        "hadamard(of=fp8(only=values), only=keys)",
    ),
    ("unrotated(of=kivi)", "unrotated(of=kivi(only=keys))", "unrotated(of=kivi(only=values))"),
    ("bit_table(of=kivi)", "bit_table(of=kivi(only=keys))", "bit_table(of=kivi(only=values))"),
    (
        "lowrank(basis=random, of=vector)",
        "lowrank(basis=random, of=vector(only=keys), only=keys)",
        "lowrank(basis=random, of=vector(only=values), only=values)",
    ),
    ("lowrank(basis=random, only=keys)", "lowrank(basis=random, only=keys)", None),
    ("hadamard(of=vector(only=values), only=keys)", None, "hadamard(of=vector(only=values), only=keys)"),
]


def codec_of(text: str) -> Codec:
    return Plan.parse(text).encode


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_one_side_by_hand(case: tuple[str, str | None, str | None], side: str) -> None:
    codec, expected = codec_of(case[0]), case[1 if side == "keys" else 2]
    before = repr(codec)
    if expected is None:
        with pytest.raises(ValueError, match=rf"outer: only={side} leaves \w+ in `of` nothing to code: leave it out"):
            codec.one_sided(side, "outer")  # type: ignore[arg-type]
    else:
        assert codec.one_sided(side, "outer") == codec_of(expected)  # type: ignore[arg-type]
    assert repr(codec) == before
