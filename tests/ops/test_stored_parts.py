"""What kernels take as places is checked where a segment comes from a file: channels that stay, whole tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.encode.test_lowrank import told
from tests.support.segments_of import states

from kvtailor.encode.channels import Channels
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.minicache import MiniCache
from kvtailor.encode.nuq import Nuq
from kvtailor.ops.segments.stored_parts import check_segment
from kvtailor.types import Layout

LAYOUT = Layout(rows=1, heads=2, size=63, start=0)


@pytest.mark.parametrize("channel", [10, 255])
def test_a_channel_that_is_none_is_refused(channel: int) -> None:
    codec = Hadamard(of=Channels(keep=0.5), only="values")
    segment = codec.for_layer(told(heads=2, size=10)).encode(LAYOUT, states((2, 63, 10), 1), states((2, 63, 8), 2))
    check_segment(segment, torch.float32)
    segment.inner.keys.kept[1, 0, 3] = channel
    with pytest.raises(ValueError, match=f"channels go from 0 to {channel} as torch.uint8, and there are 10"):
        check_segment(segment, torch.float32)


@pytest.mark.parametrize("place", [126, -1])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_place_that_is_none_is_refused(side: str, place: int) -> None:
    codec = MiniCache(start=0.0).for_layer(told(heads=2, size=8))
    pair = [(states((2, 63, 8), seed), states((2, 63, 8), seed + 1)) for seed in (1, 3)]
    segment = codec.encode_group(LAYOUT, pair)[0]
    check_segment(segment, torch.float32)
    own = getattr(segment, side)
    places = own.places.clone()
    places[-1 if place > 0 else 0] = place
    with pytest.raises(ValueError, match="the places of whole tokens do not ascend from 0 to below 126"):
        check_segment(replace(segment, **{side: replace(own, places=places)}), torch.float32)
    with pytest.raises(ValueError, match="magnitudes are"):
        check_segment(replace(segment, **{side: replace(own, magnitudes=own.magnitudes[:, :9])}), torch.float32)


@pytest.mark.parametrize("size", [10, 300])
def test_numbers_aside_that_are_nowhere_are_refused(size: int) -> None:
    """A kernel writes them to their channels."""
    segment = Nuq(bits=3, group=8, outliers=0.1).encode(LAYOUT, states((2, 63, size), 1), states((2, 63, 8), 2))
    check_segment(segment, torch.float32)
    keys = segment.keys
    for channel in (size, 127 if size < 256 else -1):
        channels = keys.channels.clone()
        channels[-1] = channel
        with pytest.raises(ValueError, match="channels kept aside go from"):
            check_segment(replace(segment, keys=replace(keys, channels=channels)), torch.float32)
    counts = keys.counts.clone()
    counts[1, 4] += 1
    with pytest.raises(ValueError, match="numbers are said to be kept aside"):
        check_segment(replace(segment, keys=replace(keys, counts=counts)), torch.float32)
    with pytest.raises(ValueError, match="channels of keys of a nuq segment are torch.int64 and not"):
        check_segment(replace(segment, keys=replace(keys, channels=keys.channels.long())), torch.float32)
