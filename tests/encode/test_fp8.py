"""8-bit floats: the error of their grid, a scale of their own for each head and run, and the bytes."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.fp8 import Fp8
from kvtailor.types import Layout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 31, 63, 128])
def test_no_error_above_half_a_place_of_the_mantissa(dtype: torch.dtype, slots: int) -> None:
    """Relative 2^-4 where the number is normal in e4m3; below that half of the least step, 2^-10 scales."""
    given = [(states((6, slots, 24), seed) * torch.logspace(-3, 2, 24)).to(dtype) for seed in (1, 2)]
    found = Fp8().encode(Layout(rows=2, heads=3, size=slots, start=0), *given).decode()
    eps = torch.finfo(dtype).eps
    for x, y in zip(given, found, strict=True):
        x, y = x.double(), y.double()
        for first in range(0, slots, 32):
            run, back = x[:, first : first + 32], y[:, first : first + 32]
            scale = run.abs().amax((1, 2), keepdim=True) / 448
            allowed = torch.maximum(run.abs() * 2**-4, scale * 2**-10)
            assert bool(((run - back).abs() <= allowed * (1 + 4 * eps) + 4 * eps * run.abs()).all())


def test_a_loud_head_or_run_hurts_no_other() -> None:
    keys = states((3, 64, 16), 3) * 1e-3
    loud = keys.clone()
    loud[1] *= 1e5
    loud[0, 32:] *= 1e5
    layout = Layout(rows=1, heads=3, size=64, start=0)
    one, two = (Fp8().encode(layout, k, k).decode()[0] for k in (keys, loud))
    assert torch.equal(one[2], two[2]) and torch.equal(one[0, :32], two[0, :32])
    # Were the scale shared, these would have become zero.
    assert bool((two[2] != 0).all())


@pytest.mark.parametrize("slots", [1, 31, 128, 300])
def test_bytes_at_several_lengths(slots: int) -> None:
    keys, values = (states((6, slots, 64), seed, torch.float16) for seed in (1, 2))
    segment = Fp8(only="values").encode(Layout(rows=2, heads=3, size=slots, start=0), keys, values)
    held = sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    assert held == 6 * (slots * (64 * 2 + 64) + -(-slots // 32) * 2)
    assert Fp8().bytes_per_token(64, 64, 2) == 2 * (64 + 2 / 32)


def test_moved_tokens_take_only_the_scales_that_they_use() -> None:
    keys = states((6, 128, 16), 4)
    segment = Fp8().encode(Layout(rows=2, heads=3, size=128, start=0), keys, keys)
    lane = torch.arange(6)[:, None].expand(-1, 40)
    slot = torch.arange(30, 70)[None].expand(6, -1)  # of runs 0, 1 and 2 out of 4
    moved = segment.regather(lane, slot, Layout(rows=2, heads=3, size=40, positions=slot.to(torch.int32).contiguous()))
    assert moved.keys.scale.shape == (18, 1)
    assert torch.equal(moved.decode()[0], segment.decode()[0][:, 30:70])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"group": 0}, "fp8: group"), ({"recent": -1}, "fp8: recent"), ({"block_size": 100}, "block_size=96")],
)
def test_bad_numbers_say_what_to_write(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8(**options)
