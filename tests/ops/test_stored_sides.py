"""What stands in other coordinates is read as it lies: the query and the sum go over, and no token does."""

import pytest
import torch
from tests.encode.test_lowrank import told
from tests.support.segments_of import Padded, states, uneven

from kvtailor.encode.channels import Channels, KeptChannels
from kvtailor.encode.fp8 import Fp8
from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard, HadamardSegment
from kvtailor.encode.higgs import Higgs
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.minicache import MiniCache, MiniCacheSegment
from kvtailor.encode.nuq import Nuq
from kvtailor.encode.plain import Plain
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.encode.subspace.orthogonal import Orthogonal
from kvtailor.encode.unrotated import Unrotated, UnrotatedSegment
from kvtailor.encode.vector import Vector
from kvtailor.ops import dispatch
from kvtailor.ops.attention import parts
from kvtailor.ops.attention.parts import counting, read_all
from kvtailor.ops.codes.sides import FloatCodes
from kvtailor.ops.segments.latents import LatentSegment
from kvtailor.ops.segments.sides import stored_sides
from kvtailor.types import Coordinates, Layout, PlainSegment, Softmax

ROWS, HEADS, GROUP, SIZE = 2, 4, 3, 8
CODECS = {
    "hadamard": Hadamard(of=Vector(bits=4, symmetric=False)),
    "hadamard keys": Hadamard(of=Kivi(bits=4, group=8), only="keys"),
    "projected": Hadamard(of=Gaussian(bits=3, qjl="both"), signs=0),
    "projected keys": Gaussian(bits=2, qjl="keys"),
    "projected values": Hadamard(of=Gaussian(bits=4, qjl="values"), only="values", signs=1),
    "grid": Hadamard(of=Higgs(bits=2), signs=0),
    "grid keys": Hadamard(of=Higgs(bits=4, only="keys"), only="keys"),
    "hadamard values": Hadamard(of=Vector(bits=8), only="values"),
    "twice": Hadamard(of=Hadamard(of=Vector(bits=8), only="keys"), signs=1),
    "single heads": LowRank(rank=0.5),
    "one basis": LowRank(rank=0.5, shared=True),
    "one basis, centred": LowRank(rank=0.5, shared=True, centred=True),
    "single heads, centred": LowRank(rank=0.75, centred=True, of=Vector(bits=8)),
    "pairs of heads": LowRank(rank=0.5, heads=2),
    "all heads": LowRank(rank=0.5, heads=0),
    "centred": LowRank(rank=0.5, heads=2, centred=True),
    "keys alone": LowRank(rank=0.5, only="keys"),
    "values alone": LowRank(rank=0.5, only="values", centred=True),
    "random": Orthogonal(rank=12),
    "random coded": Orthogonal(rank=12, of=Vector(bits=4)),
    "rotated coordinates": LowRank(rank=0.5, heads=0, of=Hadamard(of=Vector(bits=8)), centred=True),
    "hadamard of all heads": Hadamard(of=LowRank(rank=0.5)),
    "channels": Channels(),
    "rotated channels": Hadamard(of=Channels(), only="keys"),
    "turned": Unrotated(of=Nuq(bits=3, outliers=0.1)),
    "turned kivi": Unrotated(of=Kivi(bits=4, group=8)),
    "turned and rotated": Unrotated(of=Hadamard(of=Vector(bits=4, symmetric=False))),
    "turned single heads": Unrotated(of=LowRank(rank=0.5, centred=True)),
    "turned pairs of heads": Unrotated(of=LowRank(rank=0.5, heads=2)),
    "turned coordinates": Unrotated(of=LowRank(rank=0.5, heads=0, of=Hadamard(of=Vector(bits=8)), centred=True)),
    "turned grid": Unrotated(of=Hadamard(of=Higgs(bits=4, only="keys"), only="keys")),
    "turned floats": Unrotated(of=Fp8()),
}


def held(codec, seed=0, ragged=False, padded=False, newest=9):
    """A segment of 67 tokens, and a tail of `newest`. Positions of a padded row count from its first token."""
    keys, values = (states((ROWS * HEADS, 67, SIZE), seed + i) for i in (1, 2))
    layout, first = Layout(rows=ROWS, heads=HEADS, size=67, start=0), torch.tensor([0, 30]) if padded else None
    if ragged:
        layout, owner, at = uneven(ROWS, HEADS, 32, most=67, columns=67, seed=seed)
        keys, values = keys[owner, at], values[owner, at]
    tail = [states((ROWS * HEADS, newest, SIZE), seed + i) for i in (3, 4)]
    last = PlainSegment(layout=Layout(rows=ROWS, heads=HEADS, size=newest, start=67), keys=tail[0], values=tail[1])
    return [codec.for_layer(told(heads=HEADS, size=SIZE)).encode(layout, keys, values, first), last]


def both(monkeypatch, found, *, new=1, weight=False, softmax=None, padded=False):
    """`read_all` of the parts, as they are stored and decoded."""
    query, columns = states((ROWS, HEADS * GROUP, new, SIZE), 9), 67 + found[-1].layout.size
    real = None
    if padded:
        real = torch.ones((ROWS, columns), dtype=torch.bool)
        real[1, :30] = False
    visible = Padded(new_tokens=new, first_column=columns - new, real=real)
    how = {"weight": counting(query, weight, None)} | ({} if softmax is None else {"softmax": softmax})
    mine = read_all(query, found, visible, 0.2, **how)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "stored_sides", lambda part: None)
        with dispatch.using("reference"):
            return mine, read_all(query, found, visible, 0.2, **how)


def same(mine, other):
    for here, there in ((mine.output, other.output), (mine.lse, other.lse)):
        # Sums of terms as large as the largest, in another order.
        rounded = 64 * torch.finfo(torch.float32).eps * float(there[there.isfinite()].abs().max().clamp(min=1))
        torch.testing.assert_close(here, there, atol=rounded, rtol=1e-5)


@pytest.mark.parametrize("name", CODECS)
def test_cpp_maps_as_torch_does(name, monkeypatch):
    found = held(CODECS[name])
    mine = both(monkeypatch, found, new=3)[0]
    monkeypatch.setattr(dispatch, "maps_of", lambda query: (Coordinates.of_queries, Coordinates.of_sums))
    same(mine, both(monkeypatch, found, new=3)[0])


@pytest.fixture
def undecoded(monkeypatch):
    """No segment in other coordinates may be decoded."""

    def refuse(self):
        raise AssertionError(f"{type(self).__name__} was decoded")

    for kind in (HadamardSegment, LatentSegment, UnrotatedSegment):
        monkeypatch.setattr(kind, "view", refuse)
        monkeypatch.setattr(kind, "decode", refuse)
    monkeypatch.setattr(KeptChannels, "decode", refuse)
    return monkeypatch


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("name", CODECS)
def test_equals_what_decoded_states_give(name, new, padded, monkeypatch):
    found = held(CODECS[name], padded=padded)
    same(*both(monkeypatch, found, new=new, padded=padded))


@pytest.mark.parametrize(
    "name",
    [
        "hadamard",
        "single heads",
        "one basis",
        "values alone",
        "channels",
        "turned",
        "turned kivi",
        "turned single heads",
    ],
)
def test_ragged_heads(name, monkeypatch):
    same(*both(monkeypatch, held(CODECS[name], ragged=True)))


@pytest.mark.parametrize("name", CODECS)
def test_nothing_is_decoded(name, undecoded):
    part, tail = held(CODECS[name])
    own = stored_sides(part)
    assert own is not None
    own = own.in_numbers() if isinstance(own.keys, KeptChannels | FloatCodes) or name == "turned grid" else own
    query = states((ROWS, HEADS * GROUP, 1, SIZE), 9)
    asked = own.map_query(query.view(ROWS * HEADS, GROUP, 1, SIZE))
    assert dispatch.coded_attention(asked, own.keys, own.values, turned=own.turned)
    read_all(query, [part, tail], Padded(new_tokens=1, first_column=75), 0.2)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("with_mass", [False, True])
def test_mass_caps_and_sinks(name, with_mass, monkeypatch):
    softmax = Softmax(softcap=1.5, sinks=torch.linspace(-1, 1, HEADS * GROUP))
    mine, other = both(monkeypatch, held(CODECS[name]), weight=with_mass, softmax=softmax)
    torch.testing.assert_close(mine.output, other.output, atol=1e-5, rtol=1e-5)
    for a, b in zip(mine.mass or [], other.mass or [], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert (mine.mass is not None) == with_mass


@pytest.mark.parametrize("new", [1, 5, 20])
@pytest.mark.parametrize("name", ["one basis, centred", "single heads, centred", "turned single heads", "centred"])
def test_mass_where_a_mean_shifts_all_logits_of_a_part(name, new, monkeypatch):
    """The mean is large, as keys have it, and one row sees less than the other."""
    found = held(CODECS[name], newest=new + 2)
    basis = getattr(found[0], "keys_basis", None)
    if basis is not None:
        basis.mean.mul_(3.0).add_(1.0)
    mine, other = both(monkeypatch, found, new=new, weight=True, softmax=Softmax(sinks=torch.ones(HEADS * GROUP)))
    same(mine, other)
    for one, two in zip(mine.mass, other.mass, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_a_map_of_each_token_is_none_for_all():
    for around in (Unrotated(of=Unrotated(of=Vector(bits=8))), Hadamard(of=Unrotated(of=Vector(bits=8)))):
        # What is turned twice, or mixed after it was turned.
        assert stored_sides(held(around)[0]) is None
    # What is whole is not where the directions are.
    assert stored_sides(half_of(MiniCache(start=0.0, of=Hadamard(of=Vector(bits=4, symmetric=False))))[0]) is None


def half_of(codec, upper=True):
    """A segment of a pair, and a tail."""
    part, tail = held(Plain(block_size=16))
    keys, values = part.decode()
    states_of_both = [(keys, values), (1.5 * keys + 0.3 * values, values - 0.4 * keys)]
    codec = codec.for_layer(told(heads=HEADS, size=SIZE))
    return [codec.encode_group(part.layout, states_of_both)[upper], tail]


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize(
    "codec",
    [
        MiniCache(start=0.0),
        MiniCache(start=0.0, retained=0.3, only="keys"),
        MiniCache(start=0.0, of=Kivi(bits=4, group=8), only="values"),
        MiniCache(start=0.0, of=Vector(bits=4)),
    ],
    ids=str,
)
def test_halves_of_a_pair_are_read_as_they_lie(codec, upper, new, monkeypatch):
    found, refuse = half_of(codec, upper), lambda self: 1 / 0
    expected = both(monkeypatch, found, new=new)[1]
    monkeypatch.setattr(MiniCacheSegment, "decode", refuse)
    query = states((ROWS, HEADS * GROUP, new, SIZE), 9)
    same(read_all(query, found, Padded(new_tokens=new, first_column=76 - new), 0.2), expected)


def test_both_sides_of_a_wrong_map_would_show(monkeypatch):
    """The queries' map forgotten, and that of the sums."""
    found = held(CODECS["hadamard"])
    for forgotten in ("keys_in", "values_in"):
        with monkeypatch.context() as patch:
            real = parts.stored_sides
            patch.setattr(parts, "stored_sides", lambda part, real=real, name=forgotten: _without(real(part), name))
            mine, other = both(monkeypatch, found)
        assert not torch.allclose(mine.output, other.output, atol=0.05)


def _without(own, name):
    return own._replace(**{name: ()})
