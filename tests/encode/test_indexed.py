"""Page bounds are those of the tokens in the page, and nothing wider."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.indexed import Indexed
from kvtailor.types import Layout


@pytest.mark.parametrize("slots", [1, 15, 16, 63, 128])
@pytest.mark.parametrize("shift", [-50.0, 50.0])
def test_bounds_are_tight(slots: int, shift: float) -> None:
    """Shifted away from zero, so that a page filled up with zeros would show."""
    keys = states((6, slots, 24), slots) + shift
    segment = Indexed().encode(Layout(rows=2, heads=3, size=slots, start=0), keys, keys)
    for page in range(-(-slots // 16)):
        run = keys[:, page * 16 : (page + 1) * 16]
        assert torch.equal(segment.low[:, page], run.amin(1)) and torch.equal(segment.high[:, page], run.amax(1))
    assert segment.low.shape[1] == -(-slots // 16)


def test_bad_numbers_say_what_to_write() -> None:
    with pytest.raises(ValueError, match="page=16"):
        Indexed(page=0)
    with pytest.raises(ValueError, match="block_size=96"):
        Indexed(page=16, block_size=100)
