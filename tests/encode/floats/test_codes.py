"""MXFP4, MXFP8 and NVFP4: a plain loop, the distortion of normal numbers, bytes, and what no scale can hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from tests.encode.floats.naive import MAGNITUDES, mx, nearest, nv
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.encode.contract import Codec
from kvtailor.encode.floats.mxfp4 import MxFp4
from kvtailor.encode.floats.mxfp8 import MxFp8
from kvtailor.encode.floats.nvfp4 import NvFp4
from kvtailor.errors import CacheMisuse
from kvtailor.ops.codes.floats import MxCodes, NvCodes
from kvtailor.plan import Plan
from kvtailor.types import Layout

CODECS: dict[str, Codec] = {
    "nvfp4": NvFp4(),
    "mxfp4": MxFp4(),
    "mxfp8": MxFp8(),
    "mxfp8_e5m2": MxFp8(element="e5m2"),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sizes that a block divides and that none does, and one channel.
SIZES = [16, 20, 32, 33, 7, 80, 1]


def layout(slots: int, lanes: int = 1) -> Layout:
    return Layout(rows=1, heads=lanes, size=slots, start=0)


def decoded(codec: Codec, keys: Tensor) -> Tensor:
    return codec.encode(layout(keys.shape[1], keys.shape[0]), keys, keys).decode()[0]


def spread(lanes: int, slots: int, size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different magnitudes, from channel to channel and from token to token."""
    state = torch.Generator().manual_seed(seed)
    loud = torch.logspace(-4, 1, slots)[:, None] * torch.logspace(-3, 2, size)
    return (torch.randn((lanes, slots, size), generator=state) * loud).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("codec", "element"), [("mxfp4", "e2m1"), ("mxfp8", "e4m3"), ("mxfp8_e5m2", "e5m2")])
def test_mx_is_the_plain_loop_over_the_specification(codec: str, element: str, size: int, dtype: torch.dtype) -> None:
    for keys in (states((2, 7, size), size, dtype), spread(2, 7, size, size, dtype)):
        found = decoded(CODECS[codec], keys)
        wanted = [[mx(token.tolist(), element, 32) for token in lane] for lane in keys]
        assert torch.equal(found, torch.tensor(wanted).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("group", [1, 4, 32])
def test_nvfp4_is_the_plain_loop(group: int, size: int, dtype: torch.dtype) -> None:
    codec = NvFp4(group=group)
    for keys in (states((2, 7, size), size, dtype), spread(2, 7, size, size, dtype)):
        found = decoded(codec, keys)
        wanted = [[t for i in range(0, 7, group) for t in nv(lane[i : i + group].tolist(), 16)] for lane in keys]
        assert torch.equal(found, torch.tensor(wanted).to(dtype))


# Squared error of normal numbers of variance 1, by numbers on a fine grid.
GRID = torch.linspace(0, 12, 600_001, dtype=torch.float64)
DENSITY = 2 * (-GRID.square() / 2).exp() / math.sqrt(2 * math.pi) * (GRID[1] - GRID[0])


def error_of(scale: float, element: str) -> Tensor:
    """The squared error of each magnitude of the grid under one scale."""
    levels = torch.tensor(MAGNITUDES[element], dtype=torch.float64) * scale
    at = torch.bucketize(GRID, (levels[1:] + levels[:-1]) / 2)
    return (GRID - levels[at]).square()


def expected_error(block: int, element: str, scales: list[tuple[float, float, float]]) -> float:
    """Of one number of a block, whose scale follows from the block's largest magnitude.

    Of `block` numbers the largest lies below b with the probability F(b)^block; the error of one of them, where all
    others lie below b as well, is an integral up to b times F(b)^(block - 1).

    Args:
        scales: (from, to, scale): the scale of blocks whose largest magnitude lies between.
    """
    below = DENSITY.cumsum(0)
    total = 0.0
    for least, most, scale in scales:
        lost = (error_of(scale, element) * DENSITY).cumsum(0)
        for border, sign in ((most, 1), (least, -1)):
            i = int(torch.searchsorted(GRID, border)) - 1
            if i >= 0:
                total += sign * float(lost[i] * below[i] ** (block - 1))
    return total


@pytest.mark.parametrize(
    ("codec", "element", "top"),
    [("mxfp4", "e2m1", 2), ("mxfp8", "e4m3", 8), ("mxfp8_e5m2", "e5m2", 15)],
)
def test_normal_numbers_lose_under_mx_what_the_integral_says(codec: str, element: str, top: int) -> None:
    """Within 2 %; the expected errors are 0.0132 and below."""
    scales = [(2.0**e, 2.0 ** (e + 1), 2.0 ** (e - top)) for e in range(-6, 4)]
    wanted = expected_error(32, element, scales)
    keys = torch.randn((4, 512, 256), generator=torch.Generator().manual_seed(3))
    found = float((decoded(CODECS[codec], keys) - keys).square().mean())
    assert found == pytest.approx(wanted, rel=0.02)
    assert wanted == pytest.approx({"e2m1": 0.0132, "e4m3": 0.00089, "e5m2": 0.0029}[element], rel=0.05)


def test_normal_numbers_lose_under_nvfp4_what_the_integral_says() -> None:
    """Within 2 %. One number of each run is 8, so that the float32 scale is known, and its block is left out."""
    outer = 8.0 / (448 * 6)
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(MAGNITUDES["e4m3"])), 1e9]
    scales = [
        (6 * outer * low, 6 * outer * high, outer * scale)
        for (low, high), scale in zip(pairwise(borders), MAGNITUDES["e4m3"], strict=True)
    ]
    wanted = expected_error(16, "e2m1", [each for each in scales if each[0] < 12])
    keys = torch.randn((4, 512, 256), generator=torch.Generator().manual_seed(4))
    keys[:, ::32, 0] = 8.0
    found = (decoded(NvFp4(group=32), keys) - keys)[..., 16:].square().mean()
    assert float(found) == pytest.approx(wanted, rel=0.02)
    assert wanted == pytest.approx(0.0087, rel=0.05)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_the_largest_numbers(codec: Codec, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    keys = torch.zeros((1, 33, 40), dtype=dtype)
    keys[0, 1, :3] = torch.tensor([info.max, -info.max, info.max / 3], dtype=dtype)
    keys[0, 32, 5] = info.smallest_normal
    found = decoded(codec, keys)
    assert found.isfinite().all() and (found[keys == 0] == 0).all()
    top = found[0, 1, :2].double().abs()
    # 6 times 2^(emax - 2) is three quarters of the next power of two, and E4M3 reaches seven eighths of it.
    assert bool((top >= 0.74 * info.max).all())
    if not isinstance(codec, NvFp4):
        assert found[0, 32, 5] == keys[0, 32, 5]


@pytest.mark.parametrize("value", [1.0, -3.5, 2e-3, 1e-30])
def test_a_block_of_one_number_is_that_number_under_nvfp4(value: float) -> None:
    keys = torch.full((2, 40, 24), value)
    assert torch.allclose(decoded(NvFp4(), keys), keys, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_mx_cuts_what_lies_above_six_times_the_scale() -> None:
    keys = torch.zeros((1, 1, 32))
    keys[..., :4] = torch.tensor([7.99, 5.0, 2.5, -7.0])
    assert decoded(MxFp4(), keys)[0, 0, :4].tolist() == [6.0, 4.0, 2.0, -6.0]


def test_a_small_block_beside_a_large_one() -> None:
    """Below a 458,752nd part of the run's largest number no scale of E4M3 is left, above it the block stays."""
    keys = torch.zeros((1, 2, 32))
    keys[0, 0, :16], keys[0, 1, 16:] = 458752.0, 0.9
    assert (decoded(NvFp4(), keys)[0, 1] == 0).all()
    keys[0, 1, 16:] = 1.1
    assert (decoded(NvFp4(), keys)[0, 1, 16:] > 0).all()
    assert torch.equal(decoded(NvFp4(group=1), keys)[0, 1], decoded(NvFp4(group=1), keys[:, 1:])[0, 0])


@every_codec
def test_a_loud_head_or_run_hurts_no_other(codec: Codec) -> None:
    keys = states((3, 64, 16), 3) * 1e-3
    loud = keys.clone()
    loud[1] *= 1e5
    loud[0, 32:] *= 1e5
    one, two = decoded(codec, keys), decoded(codec, loud)
    assert torch.equal(one[2], two[2]) and torch.equal(one[0, :32], two[0, :32])


@pytest.mark.parametrize(("codec", "blocks", "half"), [("nvfp4", 16, 1), ("mxfp4", 32, 1), ("mxfp8", 32, 2)])
@pytest.mark.parametrize("size", [64, 80, 33, 7])
@pytest.mark.parametrize("slots", [1, 31, 128, 300])
def test_bytes_are_those_of_the_closed_form(codec: str, blocks: int, half: int, size: int, slots: int) -> None:
    keys = states((6, slots, size), 1, torch.bfloat16)
    segment = CODECS[codec].encode(Layout(rows=2, heads=3, size=slots, start=0), keys, keys)
    held = sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    each = -(-size * half // 2) + -(-size // blocks)
    runs = 4 * -(-slots // 32) if codec == "nvfp4" else 0
    assert segment.closed_form_bytes() == held == 2 * 6 * (slots * each + runs)
    assert CODECS[codec].bytes_per_token(size, size, 2) == 2 * (each + (4 / 32 if codec == "nvfp4" else 0))


def test_moved_tokens_take_only_the_scales_that_they_use() -> None:
    keys = states((6, 128, 20), 4)
    segment = NvFp4().encode(Layout(rows=2, heads=3, size=128, start=0), keys, keys)
    lane = torch.arange(6)[:, None].expand(-1, 40)
    slot = torch.arange(30, 70)[None].expand(6, -1)  # of runs 0, 1 and 2 out of 4
    moved = segment.regather(lane, slot, Layout(rows=2, heads=3, size=40, positions=slot.to(torch.int32).contiguous()))
    assert isinstance(moved.keys, NvCodes) and moved.keys.tensor_scale.shape == (18, 1)
    assert torch.equal(moved.decode()[0], segment.decode()[0][:, 30:70])
    assert moved.closed_form_bytes() == sum(t.untyped_storage().nbytes() for t in moved.tensors().values())


def test_a_piece_of_work_ends_where_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtailor.ops.codes import floats

    makers: list[Callable[[Tensor], MxCodes | NvCodes]] = [
        lambda x: NvCodes.of(x, 16, 32),
        lambda x: MxCodes.of(x, "e2m1", 32),
        lambda x: MxCodes.of(x, "e5m2", 32),
    ]
    keys = states((5, 131, 33), 6, torch.bfloat16)
    whole = [make(keys) for make in makers]
    monkeypatch.setattr(floats, "_PIECE", 33 * 40)
    for make, wanted in zip(makers, whole, strict=True):
        found = make(keys)
        assert all(torch.equal(tensor, wanted.tensors()[name]) for name, tensor in found.tensors().items())
        assert torch.equal(found.decode(), wanted.decode())


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_no_code_can_hold_is_refused(codec: Codec, bad: float) -> None:
    keys = states((1, 8, 16), 1)
    keys[0, 3, 2] = bad
    with pytest.raises(CacheMisuse, match="fp"):
        codec.encode(layout(8), keys, keys)


def test_words() -> None:
    assert Plan.parse("nvfp4").encode == NvFp4()
    assert Plan.parse("nvfp4(group=16, recent=32)").encode == NvFp4(group=16, recent=32)
    assert Plan.parse("mxfp8(element=e5m2)").encode == MxFp8(element="e5m2")
    both = Plan.parse("sides(keys=hadamard(of=mxfp8), values=nvfp4)").encode
    assert both.bytes_per_token(64, 64, 2) == 64 + 2 + 32 + 4 + 4 / 32


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: NvFp4(group=0), "nvfp4: group"),
        (lambda: NvFp4(block_size=100), "block_size=96"),
        (lambda: NvFp4(group=256), "block_size=256"),
        (lambda: MxFp4(recent=-1), "mxfp4: recent"),
        (lambda: MxFp8(block_size=0), "mxfp8: block_size"),
        (lambda: MxFp8(element="e3m4"), "e4m3 or e5m2, found 'e3m4'"),  # type: ignore[arg-type]
    ],
)
def test_bad_numbers_say_what_to_write(made: Callable[[], Codec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_the_loop_itself_knows_ties_and_the_largest() -> None:
    assert [nearest(x, "e2m1") for x in (0.25, 0.75, 2.5, 3.5, 5.0, 9.0, -0.75)] == [0.0, 1.0, 2.0, 4.0, 4.0, 6.0, -1.0]
