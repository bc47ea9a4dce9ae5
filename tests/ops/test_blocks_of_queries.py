"""A short turn over codes is read where they lie, in blocks of as many new tokens as the kernels take."""

import pytest
import torch
from tests.ops.test_stored_sides import CODECS as MAPPED
from tests.ops.test_stored_sides import GROUP, HEADS, ROWS, SIZE, both, held, same
from tests.support.segments_of import Padded, states

from kvtailor.encode.fp8 import Fp8
from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.nuq import Nuq
from kvtailor.encode.plain import Plain
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.encode.unrotated import Unrotated
from kvtailor.encode.vector import Vector
from kvtailor.ops import dispatch
from kvtailor.ops.attention import parts
from kvtailor.ops.attention.parts import read_all
from kvtailor.ops.cpu.library import built
from kvtailor.types import Softmax

CODECS = MAPPED | {
    "vector": Vector(bits=4, symmetric=False),
    "kivi": Kivi(bits=2, group=8),
    "levels": Gaussian(bits=4),
    "fitted levels": Nuq(bits=3, outliers=0.1, group=8),
    "floats": Fp8(),
}
LONGEST = dispatch.MOST_OVER_CODES
needs_built = pytest.mark.skipif(not built(), reason="without kernels nothing is read where it lies")


@pytest.mark.parametrize(("new", "padded"), [(17, True), (63, False), (LONGEST, True)])
@pytest.mark.parametrize("name", CODECS)
def test_equals_what_decoded_states_give(name, new, padded, monkeypatch):
    same(*both(monkeypatch, held(CODECS[name], padded=padded, newest=new + 2), new=new, padded=padded))


@pytest.mark.parametrize("name", ["vector", "kivi", "levels", "floats", "turned kivi"])
def test_mass_caps_and_sinks(name, monkeypatch):
    softmax = Softmax(softcap=1.5, sinks=torch.linspace(-1, 1, HEADS * GROUP))
    found = held(CODECS[name], newest=33)
    same(*both(monkeypatch, found, new=33, softmax=softmax))
    mine, other = both(monkeypatch, found, new=33, weight=True, softmax=softmax)
    for one, two in zip(mine.mass, other.mass, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-5)
    # Each query gives all that its sink does not take: nothing is counted twice, and no block is forgotten.
    shares = sum(each.sum() for each in mine.mass)
    assert 0.5 * ROWS * HEADS * GROUP * 33 < shares < ROWS * HEADS * GROUP * 33


def calls_of(monkeypatch, codec, new, **how):
    """How many new tokens each call of a kernel reads, over a part that is of this codec."""
    taken, real = [], dispatch.coded_attention

    def counted(query, keys, values, **more):
        found = real(query, keys, values, **more)
        return found and (lambda inputs: (taken.append(inputs.query.shape[-2]), found(inputs))[1])

    monkeypatch.setattr(dispatch, "coded_attention", counted)
    query = states((ROWS, HEADS * GROUP, new, SIZE), 9)
    read_all(query, held(codec, newest=new), Padded(new_tokens=new, first_column=67), 0.2, **how)
    return taken


@needs_built
def test_blocks_are_as_long_as_kernels_take(monkeypatch):
    assert calls_of(monkeypatch, Vector(bits=4), 37) == [16, 16, 16, 16, 5, 5]


@needs_built
@pytest.mark.parametrize(
    ("codec", "new"),
    [
        (Vector(bits=4), LONGEST + 1),
        # Plain states are for torch's own kernel.
        (Plain(block_size=16), 17),
        # What would be decoded, or mapped back token by token, is so once and not for each block.
        (Hadamard(of=Fp8()), 17),
        (Unrotated(of=LowRank(rank=0.5, heads=0)), 17),
    ],
)
def test_what_is_better_decoded_once_is(codec, new, monkeypatch):
    assert calls_of(monkeypatch, codec, new) == []


@needs_built
def test_a_block_that_saw_the_wrong_tokens_would_show(monkeypatch):
    found, real = held(Vector(bits=4), newest=33), parts.rule_sees

    def first_block(layout, visible, first, end, **how):
        return real(layout, visible, 0, end - first, **how)

    monkeypatch.setattr(parts, "rule_sees", first_block)
    mine, other = both(monkeypatch, found, new=33)
    assert not torch.allclose(mine.output, other.output, atol=0.05)
