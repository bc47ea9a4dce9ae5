"""One scale to a vector: half a step, the bytes of the definition, each side on its own."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.vector import Vector
from kvtailor.types import Layout


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("slots", [1, 63, 128])
def test_no_error_above_half_a_step_of_its_vector(bits: int, slots: int) -> None:
    """Symmetric: max |x| / (2^(bits - 1) - 1); asymmetric: (max - min) / (2^bits - 1)."""
    given = states((6, slots, 24), 1), states((6, slots, 33), 2)
    layout = Layout(rows=2, heads=3, size=slots, start=0)
    for symmetric in (True, False):
        found = Vector(bits=bits, symmetric=symmetric).encode(layout, *given).decode()
        for x, y in zip(given, found, strict=True):
            top = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            reach = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1)
            half = (top if symmetric else reach) / 2
            assert bool(((x - y).abs() <= half * 1.0001 + 1e-6).all())
            assert bool(((x - y).abs().amax(-1) > 0.1 * half[..., 0]).float().mean() > 0.9)


@pytest.mark.parametrize(("bits", "expected"), [(8, 128 + 2), (4, 64 + 2), (3, 48 + 2), (2, 32 + 2)])
def test_bytes_are_those_of_the_definition(bits: int, expected: int) -> None:
    """A vector of r elements takes r * bits / 8 bytes and one scale of the cache's dtype."""
    assert Vector(bits=bits).bytes_per_token(128, 128, 2) == 2 * expected
    assert Vector(bits=bits, only="keys").bytes_per_token(128, 128, 2) == expected + 256
    assert Vector(bits=bits, only="values").bytes_per_token(128, 64, 2) == 256 + 64 * bits // 8 + 2
    assert Vector(bits=bits, symmetric=False).bytes_per_token(128, 128, 2) == 2 * (expected + 2)
    assert Vector(bits=bits, key_bits=8).bytes_per_token(128, 128, 2) == 130 + expected


@pytest.mark.parametrize("slots", [1, 31, 128, 300])
def test_storages_are_those_bytes_at_several_lengths(slots: int) -> None:
    keys, values = (states((6, slots, 128), seed, torch.float16) for seed in (1, 2))
    segment = Vector(bits=3).encode(Layout(rows=2, heads=3, size=slots, start=0), keys, values)
    held = sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    assert held == 6 * slots * 2 * (48 + 2)


def test_tokens_are_coded_alone() -> None:
    keys, values = states((1, 40, 16), 1), states((1, 40, 16), 2)
    layout = Layout(rows=1, heads=1, size=40, start=0)
    together = Vector(bits=4).encode(layout, keys, values).decode()
    for token in (0, 17, 39):
        one = slice(token, token + 1)
        alone = Vector(bits=4).encode(Layout(rows=1, heads=1, size=1, start=token), keys[:, one], values[:, one])
        assert all(torch.equal(a[:, one], b) for a, b in zip(together, alone.decode(), strict=True))


def test_an_outlier_channel_hurts_the_whole_vector() -> None:
    """What the other codecs of the stage are there for."""
    keys = torch.randn((1, 64, 32), generator=torch.Generator().manual_seed(1))
    loud = keys.clone()
    loud[..., 5] = 100.0
    layout = Layout(rows=1, heads=1, size=64, start=0)
    quiet = [c for c in range(32) if c != 5]
    errors = [(Vector(bits=4).encode(layout, k, k).decode()[0] - k)[..., quiet].norm() for k in (keys, loud)]
    assert errors[1] > 5 * errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "vector: bits must be 2 to 8, found 9"),
        ({"bits": 1}, "vector: bits must be 2 to 8, found 1; asymmetric codes can have 1"),
        ({"bits": 0, "symmetric": False}, "vector: bits must be 1 to 8, found 0"),
        ({"value_bits": 12}, "vector: value_bits must be 2 to 8, found 12"),
        ({"recent": -1}, "vector: recent"),
        ({"block_size": 0}, "vector: block_size"),
    ],
)
def test_bad_numbers_say_what_to_write(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vector(**options)
