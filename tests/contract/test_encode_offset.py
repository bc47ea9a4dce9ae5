"""Whether a codec bears a constant in all keys, as a bias of the key projection adds it, is what it says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.contract.test_encode import KINDS, NAMES, SAMPLES
from tests.support.segments_of import encoded
from torch import Tensor

from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.sides import SidesCodec
from kvtailor.encode.unrotated import Unrotated
from kvtailor.encode.vector import Vector
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import KeyOffset, Layout, Rotation

# Of a key's 16 channels the constant is in those that turn slowest, as biases of trained models are.
ROTATION = Rotation(frequencies=torch.logspace(0, -4, 8))
FACTS = CodecContext(layer=1, layers=3, heads=3, rotation=ROTATION)
TOKENS, SIZE = 96, 16


def knowing(constant: Tensor) -> CodecContext:
    """The layer, with what is known of its keys."""
    return replace(FACTS, offset=KeyOffset(vectors=constant.expand(3, -1), rotation=ROTATION))


def lost(codec: Codec, offset: float) -> float:
    """Share of what keys differ by that a codec loses, where a constant of `offset` times that is in all of them."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(3, TOKENS, SIZE, generator=generator)
    values = torch.randn(3, TOKENS, SIZE, generator=generator)
    constant = torch.zeros(SIZE)
    constant[SIZE // 2 - 1], constant[SIZE - 1] = 0.8, -0.6
    size = keys.square().sum(-1).mean().sqrt()
    turned = turn(keys + offset * size * constant, torch.arange(TOKENS), ROTATION)
    layout = Layout(rows=1, heads=3, size=TOKENS, start=0)
    bound = codec.for_layer(knowing(offset * size * constant))
    if bound.ages:
        segment = bound.encode_aged(layout, turned, values, None, newest=TOKENS - 1, seen=TOKENS + bound.ages[-1])
    else:
        segment = encoded(bound, layout, turned, values)
    # What is wrong alike in all keys adds one number to all logits of a query, and changes no probability.
    error: Tensor = segment.decode()[0] - turned
    error = error - error.mean(1, keepdim=True)
    return float(error.square().sum(-1).mean() / size.square())


@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_a_codec_says_whether_it_bears_a_constant_in_all_keys(sample: Codec) -> None:
    alone, beside = lost(sample, 0.0), lost(sample, 10.0)
    harmed = beside > 0.2 and beside > 2 * alone
    assert sample.bears_offset is not harmed, (alone, beside)
    bound = sample.for_layer(knowing(torch.ones(SIZE)))
    assert bound.bears_offset or not sample.bears_offset


def test_wrappers_say_what_the_codec_of_the_keys_says() -> None:
    coarse, fine = Vector(bits=4, block_size=32), Kivi(bits=4, group=16, recent=0)
    assert not Hadamard(of=coarse).bears_offset and not Unrotated(of=coarse).bears_offset
    assert not SidesCodec(keys=coarse, values=fine).bears_offset
    assert SidesCodec(keys=fine, values=coarse).bears_offset
    assert Gaussian(only="values").bears_offset and Vector(key_bits=8, value_bits=2).bears_offset
    assert not Vector(key_bits=2, value_bits=8).bears_offset


def test_the_folder_holds_codecs() -> None:
    assert len(KINDS) > 15
