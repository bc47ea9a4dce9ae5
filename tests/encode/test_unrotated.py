"""Keys turned back before they are encoded: exact on full and partial rotations, and what it is for."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.contract import CodecContext
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.plain import Plain
from kvtailor.encode.unrotated import Unrotated
from kvtailor.types import Layout, Rotation


def rotation(size: int, *, interleaved: bool = False) -> Rotation:
    return Rotation(frequencies=10000.0 ** (-torch.arange(0, size, 2) / size), interleaved=interleaved)


def bound(codec: Unrotated, turned: Rotation) -> Unrotated:
    return codec.for_layer(CodecContext(layer=0, layers=1, rotation=turned))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [16, 24, 64])
def test_turning_back_and_again_is_exact(turned: int, interleaved: bool) -> None:
    keys, values = states((6, 63, 64), 1), states((6, 63, 20), 2)
    codec = bound(Unrotated(of=Plain()), rotation(turned, interleaved=interleaved))
    segment = codec.encode(Layout(rows=2, heads=3, size=63, start=1900), keys, values)
    found = segment.decode()
    assert float((found[0] - keys).abs().max() / keys.abs().max()) < 1e-5 and torch.equal(found[1], values)
    inside = segment.inner.decode()[0]
    assert torch.equal(inside[..., turned:], keys[..., turned:])
    assert not torch.allclose(inside[..., :turned], keys[..., :turned], atol=0.1)


def test_what_is_encoded_is_the_key_before_the_embedding() -> None:
    """By the definition: plane i of the key at position p is the complex number of its two channels times e^(i p f)."""
    turned = rotation(16)
    before = torch.randn((1, 40, 24), generator=torch.Generator().manual_seed(1))
    plane = torch.complex(before[..., :8].double(), before[..., 8:16].double())
    spun = plane * torch.exp(1j * torch.arange(100, 140)[:, None] * turned.frequencies.double())
    after = torch.cat([spun.real.float(), spun.imag.float(), before[..., 16:]], -1)
    codec = bound(Unrotated(of=Plain()), turned)
    inside = codec.encode(Layout(rows=1, heads=1, size=40, start=100), after, after).inner.decode()[0]
    assert torch.allclose(inside, before, atol=1e-4)
    moved = codec.encode(Layout(rows=1, heads=1, size=40, start=130), after, after, torch.tensor([30]))
    assert torch.allclose(moved.inner.decode()[0], before, atol=1e-4)


def test_a_channel_that_is_constant_before_the_embedding_is_lost_less() -> None:
    """Fast planes smear a channel's offset over its range; per channel and before the embedding it costs no bits."""
    turned = rotation(32)
    before = torch.randn((1, 128, 32), generator=torch.Generator().manual_seed(2)) * 0.1
    before[..., 3] += 20
    codec, layout = bound(Unrotated(of=Kivi(bits=2)), turned), Layout(rows=1, heads=1, size=128, start=0)
    positions = torch.arange(128)
    from kvtailor.ops.lanes.rotate import turn

    keys = turn(before, positions, turned)
    lost = [(c.encode(layout, keys, keys).decode()[0] - keys).norm() for c in (codec, Kivi(bits=2))]
    assert lost[0] < 0.1 * lost[1]


def test_needs_the_rotation_of_its_layer() -> None:
    codec = Unrotated(of=Kivi(bits=4))
    keys = states((1, 32, 16), 1)
    layout = Layout(rows=1, heads=1, size=32, start=0)
    assert codec.needs_rotation
    with pytest.raises(ValueError, match="unrotated: no rotary embedding was given"):
        codec.encode(layout, keys, keys)
    bound(codec, rotation(16)).encode(layout, keys, keys)
    assert codec == bound(codec, rotation(16))
