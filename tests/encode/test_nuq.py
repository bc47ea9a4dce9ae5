"""Fitted levels, outliers and first tokens kept aside: against a plain loop and the definitions."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.encode.kivi import Kivi
from kvtailor.encode.nuq import Nuq, NuqSegment
from kvtailor.ops.codes.nonuniform import _farthest as farthest
from kvtailor.ops.codes.nonuniform import fit_levels
from kvtailor.plan import Plan
from kvtailor.types import Layout


def layout_of(slots: int, start: int = 0) -> Layout:
    return Layout(rows=1, heads=2, size=slots, start=start)


def by_vector(side: str, x: Tensor, first: int, end: int) -> list[Tensor]:
    """The vectors of one lane's run of tokens: channels of keys, tokens of values."""
    run = x[first:end]
    return list(run.T) if side == "keys" else list(run)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("slots", [63, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_number_is_aside_or_at_the_level_nearest_to_it(bits: int, slots: int, dtype: torch.dtype) -> None:
    codec = Nuq(bits=bits, outliers=0.05, sinks=0)
    given = {"keys": states((2, slots, 24), 1, dtype), "values": states((2, slots, 40), 2, dtype)}
    segment: NuqSegment = codec.encode(layout_of(slots), given["keys"], given["values"])  # type: ignore[assignment]
    eps = torch.finfo(dtype).eps
    for side, found in zip(("keys", "values"), segment.decode(), strict=True):
        for lane in range(2):
            for run, first in enumerate(range(0, slots, 64)):
                end = min(first + 64, slots)
                levels = getattr(segment, side).levels[lane, run].double()
                assert levels.shape == (2**bits,) and bool((levels.diff() >= 0).all())
                vectors = by_vector(side, given[side][lane], first, end)
                for x, y in zip(vectors, by_vector(side, found[lane], first, end), strict=True):
                    x, y = x.double(), y.double()
                    kept = int(0.05 * len(x) + 0.5)
                    far = (x - x.mean()).abs().sort(descending=True, stable=True).indices[:kept]
                    dense = torch.ones(len(x), dtype=torch.bool)
                    dense[far] = False
                    assert torch.equal(y[far], x[far])
                    low, high = x[dense].min(), x[dense].max()
                    grid = low + levels * (high - low)
                    best = (x[dense, None] - grid).abs().amin(1)
                    rounding = 8 * eps * (high - low + x.abs().max())
                    assert bool(((x[dense] - y[dense]).abs() <= best + rounding).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_lloyds_levels_lose_no_more_than_even_ones(bits: int) -> None:
    """On bells, on two heaps and on even numbers: what is fitted starts from even levels and never gets worse."""
    draw = torch.Generator().manual_seed(1)
    bell = torch.randn((1, 1, 4000), generator=draw)
    heaps = torch.cat([bell[..., :2000] * 0.05, bell[..., 2000:] * 0.02 + 1], -1)
    even = torch.rand((1, 1, 4000), generator=draw)
    for z, gain in ((bell, 0.95), (heaps, 0.6), (even, 1.005)):
        z = (z - z.amin()) / (z.amax() - z.amin())
        fitted = fit_levels(z, torch.ones_like(z, dtype=torch.bool), bits)[0, 0]
        lost = [
            (z[0, 0, :, None] - grid).abs().amin(1).square().sum() for grid in (fitted, torch.linspace(0, 1, 2**bits))
        ]
        assert lost[0] <= gain * lost[1]
        centres = [z[0, 0][(z[0, 0, :, None] - fitted).abs().argmin(1) == i].mean() for i in range(2**bits)]
        # Each level is the mean of what is nearest to it, up to the width of a bin.
        assert all(abs(float(c) - float(level)) < 1 / 100 for c, level in zip(centres, fitted, strict=True) if c == c)


def test_what_does_not_count_moves_no_level() -> None:
    z = torch.rand((2, 3, 500), generator=torch.Generator().manual_seed(2))
    used = torch.rand(z.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    other = torch.where(used, z, 1 - z)
    assert torch.equal(fit_levels(z, used, 3), fit_levels(other, used, 3))


def test_an_outlier_costs_its_vector_nothing() -> None:
    keys = torch.randn((2, 64, 16), generator=torch.Generator().manual_seed(4))
    loud = keys.clone()
    loud[0, 40, 7] = 1000.0
    for outliers, most in ((0.02, 0.3), (0.0, None)):
        found = Nuq(bits=4, outliers=outliers, sinks=0).encode(layout_of(64), loud, loud).decode()[0]
        error = (found - loud)[0, :, 7].abs().max()
        assert error < most if most is not None else error > 1
        assert (found[0, 40, 7] == 1000.0) == (most is not None)


@pytest.mark.parametrize(("used", "aside"), [(64, 6), (45, 5), (44, 4), (4, 0), (0, 0)])
def test_so_many_of_a_vector_are_kept_aside_as_are_used_in_it(used: int, aside: int) -> None:
    keys = torch.randn((2, 64, 16), generator=torch.Generator().manual_seed(5))
    counts = torch.arange(64).expand(2, 16, 64).transpose(1, 2) < used
    far = farthest(keys, counts, 0.1, 1)
    assert (far.sum(1) == aside).all() and not (far & ~counts).any()


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_first_tokens_stay_as_they_are_wherever_they_stand(sinks: int) -> None:
    keys, values = states((2, 90, 24), 5), states((2, 90, 20), 6)
    keys[:, :4] *= 30
    codec = Nuq(bits=2, sinks=sinks)
    padded = Layout(rows=2, heads=1, size=90, positions=torch.arange(9, 99, dtype=torch.int32).repeat(2, 1))
    for segment in (
        codec.encode(layout_of(90), keys, values),
        codec.encode(padded, keys, values, torch.tensor([9, 9])),
    ):
        for found, given in zip(segment.decode(), (keys, values), strict=True):
            assert torch.equal(found[:, :sinks], given[:, :sinks])
            assert bool((found[:, sinks:] != given[:, sinks:]).any(-1).all())
    much_later = codec.encode(layout_of(90, start=200), keys, values).decode()[0]
    assert bool((much_later[:, :4] != keys[:, :4]).any(-1).all())
    # Loud first tokens, kept aside, widen no channel's range.
    error = [
        (c.encode(layout_of(90), keys, values).decode()[0] - keys)[:, 4:].norm() for c in (codec, Nuq(bits=2, sinks=4))
    ]
    assert error[1] <= error[0]


def test_bytes_by_hand() -> None:
    """nuq3, 16-bit, 64 channels, groups of 64: 24 bytes of codes, one outlier of 3 bytes, a count of 1, 8 levels / 64.

    A key has 2 scales for each channel and 64 tokens, and one outlier for each channel and 64 tokens.
    """
    levels = 8 * 2 / 64
    key, value = 24 + 2 * 2 * 64 / 64 + 3 + 1 + levels, 24 + 2 * 2 + 3 + 1 + levels
    assert Nuq().bytes_per_token(64, 64, 2) == key + value
    assert Nuq(only="keys").bytes_per_token(64, 64, 2) == key + 128
    assert Nuq(outliers=0.0).bytes_per_token(64, 64, 2) == key + value - 6


@pytest.mark.parametrize("size", [255, 256])
def test_many_channels_take_wider_numbers(size: int) -> None:
    keys = states((2, 64, size), 7, torch.float16)
    segment = Nuq(bits=4, sinks=2).encode(layout_of(64), keys, keys)
    held = sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    assert held == segment.closed_form_bytes()
    assert torch.equal(segment.decode()[0][:, :2], keys[:, :2])


def test_long_lanes_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = states((3, 200, 24), 1), states((3, 200, 20), 2)
    layout = Layout(rows=1, heads=3, size=200, start=0)
    whole = Nuq().encode(layout, keys, values)
    monkeypatch.setattr("kvtailor.ops.codes.nonuniform._AT_ONCE", 2000)
    pieces = Nuq().encode(layout, keys, values)
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors().values(), pieces.tensors().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.decode(), pieces.decode(), strict=True))


def test_loses_less_than_even_levels_at_the_same_bits() -> None:
    keys, values = states((2, 256, 64), 8), states((2, 256, 64), 9)
    for bits in (2, 3, 4):
        ours = Nuq(bits=bits, sinks=0).encode(layout_of(256), keys, values).decode()
        even = Kivi(bits=bits, group=64, recent=64).encode(layout_of(256), keys, values).decode()
        for a, b, x in zip(ours, even, (keys, values), strict=True):
            assert (a - x).norm() < 0.9 * (b - x).norm()


def test_the_presets_are_the_papers() -> None:
    for bits in (2, 3, 4):
        assert str(Plan.parse(f"kvquant{bits}")).startswith("unrotated(of=nuq")
        assert Plan.parse(f"kvquant{bits}") == Plan.parse(f"unrotated(of=nuq(bits={bits}))")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "nuq: bits must be 1 to 8, found 9"),
        ({"outliers": 0.5}, "nuq: outliers must be from 0 to below 0.5, found 0.5"),
        ({"sinks": -1}, "nuq: sinks must be 0 tokens or more"),
        ({"group": 0}, "nuq: group must be 1 tokens or more"),
        ({"block_size": 100}, "block_size=128"),
    ],
)
def test_bad_numbers_say_what_to_write(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Nuq(**options)
