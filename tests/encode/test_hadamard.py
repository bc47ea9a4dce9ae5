"""The rotation and its inverse, and what it does to outlier channels."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.contract import CodecContext
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.vector import Vector
from kvtailor.ops.codes.hadamard import block_of, mixed, unmixed
from kvtailor.plan import Plan
from kvtailor.types import Layout

LAYOUT = Layout(rows=1, heads=1, size=64, start=0)


@pytest.mark.parametrize(("size", "block"), [(64, 64), (128, 128), (80, 16), (96, 32), (24, 8), (33, 1), (7, 1)])
def test_is_sylvesters_matrix_in_blocks(size: int, block: int) -> None:
    """Entry (i, j) is -1 to the number of ones that i and j have in common, by definition."""
    assert block_of(size) == block
    x = states((3, 5, size), 1)
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(block)] for i in range(block)])
    expected = torch.block_diag(*[signs] * (size // block))
    assert torch.allclose(mixed(x) * block, x @ expected.T, atol=1e-4)
    assert torch.allclose(unmixed(mixed(x)), x, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_result_is_larger_than_the_largest_input(dtype: torch.dtype) -> None:
    x = torch.full((2, 64), float(torch.finfo(dtype).max), dtype=dtype)
    assert bool(mixed(x).isfinite().all()) and torch.equal(unmixed(mixed(x)), x)


def test_it_helps_one_scale_for_all_channels_and_not_one_for_each() -> None:
    """One channel at 50 times the others: vector(bits=4) loses them, and not after a rotation."""
    keys = torch.randn((1, 64, 64), generator=torch.Generator().manual_seed(1))
    keys[..., 5] *= 50
    quiet = [c for c in range(64) if c != 5]

    def lost(codec) -> float:  # type: ignore[no-untyped-def]
        return float((codec.encode(LAYOUT, keys, keys).decode()[0] - keys)[..., quiet].norm() / keys[..., quiet].norm())

    assert lost(Vector(bits=4)) > 0.8 > 0.6 > lost(Hadamard(of=Vector(bits=4)))
    assert lost(Kivi(bits=4)) < 0.3 * lost(Hadamard(of=Kivi(bits=4)))


@pytest.mark.parametrize(("only", "turned"), [("keys", 0), ("values", 1)])
def test_one_side_alone(only: str, turned: int) -> None:
    given = states((1, 64, 32), 1), states((1, 64, 32), 2)
    plain = Vector(bits=4).encode(LAYOUT, *given).decode()
    both = Hadamard(of=Vector(bits=4)).encode(LAYOUT, *given).decode()
    one = Hadamard(of=Vector(bits=4), only=only).encode(LAYOUT, *given).decode()
    assert torch.equal(one[turned], both[turned]) and torch.equal(one[1 - turned], plain[1 - turned])
    assert not torch.equal(both[turned], plain[turned])


def test_costs_no_memory_and_keeps_what_the_codec_says() -> None:
    inner = Kivi(bits=2, group=16, recent=64)
    outer = Hadamard(of=inner)
    assert (outer.tail, outer.block, outer.lane_multiple) == (64, 64, 16)
    assert outer.bytes_per_token(64, 64, 2) == inner.bytes_per_token(64, 64, 2)
    assert outer.encode_flops(tokens=10, key_size=64, value_size=24) == (
        inner.encode_flops(tokens=10, key_size=64, value_size=24) + 10 * 2 * (64 * 64 + 8 * 24)
    )
    assert not outer.needs_rotation


def test_a_plan_writes_it() -> None:
    plan = Plan.parse("hadamard(of=bit_table(of=kivi, keys=1), only=keys)")
    assert str(plan) == "hadamard(of=bit_table(of=kivi, keys=1), only=keys)"
    low = plan.encode.for_layer(CodecContext(layer=2, layers=3))
    assert low == Hadamard(of=Kivi(key_bits=1, value_bits=1), only="keys")


def test_a_rotation_that_undoes_the_other_is_refused():
    inner = Hadamard(of=Vector(bits=4))
    for both in (Hadamard(of=Vector(bits=4), only="keys"), inner):
        with pytest.raises(ValueError, match="undoes the first"):
            Hadamard(of=both)
    assert Hadamard(of=inner, signs=1) and Hadamard(of=Hadamard(of=Vector(bits=4), only="keys"), only="values")
