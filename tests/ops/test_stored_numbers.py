"""Codes that no kernel reads become numbers where they are: the query and the sum go over, and no token comes back."""

import pytest
import torch
from tests.ops.test_stored_sides import GROUP, HEADS, ROWS, SIZE, both, held, same
from tests.support.segments_of import Padded, states

from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard, HadamardSegment
from kvtailor.encode.higgs import Higgs
from kvtailor.encode.nuq import Nuq
from kvtailor.ops.attention.parts import read_all
from kvtailor.ops.codes.gaussian import ResidualCodes
from kvtailor.ops.cpu.library import built
from kvtailor.ops.segments.sides import stored_sides
from kvtailor.types import Softmax

CODECS = {
    "projected": Hadamard(of=Gaussian(bits=3, qjl="both"), signs=0),
    "projected keys": Gaussian(bits=2, qjl="keys"),
    "projected values": Hadamard(of=Gaussian(bits=4, qjl="values"), only="values", signs=1),
    "grid": Hadamard(of=Higgs(bits=2), signs=0),
    "fitted levels": Hadamard(of=Nuq(bits=3, group=8)),
}


@pytest.mark.parametrize(("new", "padded", "ragged"), [(1, False, False), (5, True, False), (1, False, True)])
@pytest.mark.parametrize("name", CODECS)
def test_equals_what_decoded_states_give(name, new, padded, ragged, monkeypatch):
    same(*both(monkeypatch, held(CODECS[name], ragged=ragged), new=new, padded=padded))


@pytest.mark.parametrize("name", ["projected", "grid"])
def test_mass_and_caps(name, monkeypatch):
    found = held(CODECS[name])
    same(*both(monkeypatch, found, softmax=Softmax(softcap=2.0)))
    mine, other = both(monkeypatch, found, weight=True)
    for one, two in zip(mine.mass, other.mass, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not built(), reason="without kernels parts are decoded together")
@pytest.mark.parametrize("name", CODECS)
def test_no_token_is_brought_back(name, monkeypatch):
    def refuse(self):
        raise AssertionError(f"{type(self).__name__} was decoded")

    for kind in (HadamardSegment, ResidualCodes):
        monkeypatch.setattr(kind, "decode", refuse)
    found = held(CODECS[name])
    query = states((ROWS, HEADS * GROUP, 1, SIZE), 9)
    read_all(query, found, Padded(new_tokens=1, first_column=75), 0.2)


def test_a_projected_side_has_twice_as_many_numbers():
    own = stored_sides(held(CODECS["projected"])[0])
    assert own is not None and own.in_numbers().keys.states.shape[-1] == 2 * SIZE
    query = states((ROWS * HEADS, GROUP, 1, SIZE), 9)
    assert own.map_query(query).shape == (ROWS * HEADS, GROUP, 1, 2 * SIZE) and own.channels() == (SIZE, SIZE)
