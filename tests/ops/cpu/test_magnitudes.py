"""Directions times magnitudes, and tokens that are whole, by every variant, against states in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.cpu.coded_layouts import COARSE, LAYOUTS, every_dtype, every_variant, exact, needs_built, states_of
from tests.ops.cpu.coded_truth import same, truth
from torch import Tensor

from kvtailor.ops.attention.cpu import attention
from kvtailor.ops.attention.cpu.attention import attend_and_keep, attend_coded
from kvtailor.ops.attention.cpu.sides import unsuited
from kvtailor.ops.attention.definition import reference
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole
from kvtailor.ops.segments.pair_sides import Magnified, MergedSide

pytestmark = needs_built
INSIDE = ("plain", "vector8", "vector3", "tokens4", "channels4", "channels4x5", "levels3", "grid2", "nvfp4", "mxfp4")
# (n, g, t, s, d): odd sizes, several blocks and pieces.
SIZES = [(3, 4, 1, 63, 64), (2, 3, 5, 600, 24), (1, 1, 16, 257, 80), (1, 4, 1, 2300, 128), (1, 1, 1, 1, 16)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN."""
    empty = torch.empty
    monkeypatch.setattr(attention.torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))


def magnified(layout: str, directions: Tensor, share: float, seed: int) -> tuple[Magnified, Whole]:
    """A side of these directions (m, s, c), of which such a share is whole, and what it stands for, in float64."""
    lanes, slots, size = directions.shape
    generator, dtype = torch.Generator().manual_seed(seed), directions.dtype
    magnitudes = (torch.rand((lanes, slots, 1), generator=generator) * 4).to(dtype)
    places = (torch.rand(lanes * slots, generator=generator) < share).nonzero()[:, 0]
    whole = torch.randn((places.shape[0], size), generator=generator).to(dtype)
    coded = LAYOUTS[layout](directions)
    states = exact(coded) * magnitudes.double()
    states.flatten(0, 1)[places] = whole.double()
    own = MergedSide(magnitudes=magnitudes, places=places.to(torch.int32), whole=whole)
    return Magnified(directions=coded, own=own), Whole(states=states)


def pair(layout: str, dtype: torch.dtype, lanes: int, slots: int, size: int, share: float):
    """Keys and values, and what they stand for."""
    keys, values = states_of(lanes + slots, dtype, lanes, slots, size)
    return *magnified(layout, keys, share, 1), *magnified(layout, values, share, 2)


@every_variant
@every_dtype
@pytest.mark.parametrize("layout", INSIDE)
def test_equals_the_states(library: Library, dtype: torch.dtype, layout: str) -> None:
    for (owners, group, new, slots, size), share in zip(SIZES, (0.2, 0.05, 0.0, 0.05, 1.0), strict=True):
        keys, key_states, values, value_states = pair(layout, dtype, owners, slots, size, share)
        assert unsuited(keys, values) is None
        query = torch.randn((owners, group, new, size), generator=torch.Generator().manual_seed(3))
        tolerance = COARSE if dtype != torch.float32 else 1e-5
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        assert same(found, truth(query, key_states, value_states), tolerance)
        # Each side for itself.
        plain = Whole(states=states_of(9, dtype, owners, slots, size)[0])
        found = attend_coded(AttentionInputs(query, keys, plain, scaling=0.1), using=library)
        assert same(found, truth(query, key_states, plain), tolerance)
        found = attend_coded(AttentionInputs(query, plain, values, scaling=0.1), using=library)
        assert same(found, truth(query, plain, value_states), tolerance)


@every_variant
@pytest.mark.parametrize("layout", ["plain", "tokens4", "channels4"])
def test_caps_and_what_is_seen_and_how_much_it_counts(library: Library, layout: str) -> None:
    keys, key_states, values, value_states = pair(layout, torch.float32, 3, 300, 40, 0.1)
    generator = torch.Generator().manual_seed(5)
    query, visible = torch.randn((3, 2, 3, 40), generator=generator), torch.rand((3, 3, 300), generator=generator) < 0.3
    visible[0, 0] = False
    log_weight = torch.rand((3, 300), generator=generator) * 3
    how = {"visible": visible, "log_weight": log_weight, "softcap": 1.5}
    found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, **how), using=library)
    assert same(found, truth(query, key_states, value_states, **how))
    assert not same(found, truth(query, key_states, value_states, visible, log_weight))


@every_variant
@pytest.mark.parametrize("layout", ["plain", "vector8"])
def test_lanes_of_an_owner(library: Library, layout: str) -> None:
    """Full lanes that are read as one, and one that is not full."""
    keys, key_states, values, value_states = pair(layout, torch.float32, 6, 64, 32, 0.1)
    owner, lengths = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([64, 64, 64, 64, 64, 9], dtype=torch.int32)
    query = torch.randn(2, 3, 1, 32)
    out, lse = attend_coded(
        AttentionInputs(query, keys, values, scaling=0.1, owner=owner, lengths=lengths), using=library
    )
    for mine in range(2):
        lanes = (owner == mine).nonzero()[:, 0].tolist()
        k, v = (
            Whole(states=torch.cat([side.states[lane, : lengths[lane]] for lane in lanes])[None])
            for side in (key_states, value_states)
        )
        expected = truth(query[mine : mine + 1], k, v)
        assert same((out[mine : mine + 1], lse[mine : mine + 1]), expected)


@every_variant
@pytest.mark.parametrize("layout", ["plain", "channels4"])
def test_mass_is_that_of_the_weights_and_not_of_what_they_are_multiplied_with(library: Library, layout: str) -> None:
    keys, key_states, values, _ = pair(layout, torch.float32, 2, 300, 24, 0.1)
    query, counts = torch.randn(2, 3, 2, 24), torch.rand(2, 2)
    _, lse, kept = attend_and_keep(AttentionInputs(query, keys, values, scaling=0.1), using=library)
    rows = query.double().reshape(1, 6, 2, 24)
    weights = reference(rows, key_states.states[None], key_states.states[None], None, 0.1, None)[2]
    expected = torch.einsum("ngts,nt->ns", weights[0], counts.double())
    torch.testing.assert_close(kept.mass(lse, counts).double(), expected, rtol=1e-4, atol=1e-7)


def test_what_does_not_fit_is_refused() -> None:
    keys, _, values, _ = pair("plain", torch.float32, 2, 9, 8, 0.4)
    narrow = replace(keys, own=replace(keys.own, whole=keys.own.whole[:, :5]))
    with pytest.raises(ValueError, match="tokens that are whole have 5 channels, and directions 8"):
        attend_coded(AttentionInputs(torch.randn(2, 1, 1, 8), narrow, values, scaling=1.0))
    signs = replace(keys, directions=LAYOUTS["signs3"](torch.randn(2, 9, 8)))
    assert "no C++ kernel reads signs and magnitudes" in str(unsuited(signs, values))
    own = keys.own
    own.check(2, 9)
    for wrong in (
        replace(own, places=own.places + 18),
        replace(own, places=own.places - 1 - own.places[0]),
        replace(own, places=own.places.flip(0)),
        replace(own, places=own.places[1:]),
        replace(own, places=own.places.long()),
        replace(own, magnitudes=own.magnitudes[:1]),
        replace(own, magnitudes=own.magnitudes.double()),
    ):
        with pytest.raises(ValueError, match="places|magnitudes"):
            wrong.check(2, 9)
