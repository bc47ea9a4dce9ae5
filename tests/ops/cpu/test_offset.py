"""What a constant that was taken off keys adds to logits, by every variant, against a plain loop in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.cpu.coded_layouts import every_variant, needs_built
from tests.support.segments_of import Padded
from torch import Tensor

from kvtailor.encode.contract import CodecContext
from kvtailor.ops import dispatch
from kvtailor.ops.attention.cpu.attention import attend_and_keep, attend_coded
from kvtailor.ops.attention.parts import read_all
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.sides import StoredSides, stored_sides
from kvtailor.plan import Plan
from kvtailor.types import KeyOffset, Layout, PlainSegment, Rotation, Softmax

pytestmark = [needs_built, pytest.mark.usefixtures("poisoned")]
HEADS, SCALING = 2, 0.01
ROTATED = "hadamard(of=gaussian(bits=4, block_size=1), signs=0)"
# Channels of a key, and how they turn: all in halves, neighbours, a part of them, an odd number of planes, none.
KINDS: dict[str, tuple[int, Rotation | None]] = {
    "halves": (64, Rotation(frequencies=1e6 ** (-torch.arange(32) / 32))),
    "neighbours": (128, Rotation(frequencies=1e4 ** (-torch.arange(64) / 64), interleaved=True)),
    "part": (80, Rotation(frequencies=1e4 ** (-torch.arange(10) / 10))),
    "odd": (26, Rotation(frequencies=1e4 ** (-torch.arange(13) / 13), interleaved=True)),
    "still": (64, None),
}


def offset_of(kind: str) -> KeyOffset:
    """Some hundred times what keys differ by, another in each head."""
    size, rotation = KINDS[kind]
    drawn = torch.randn(HEADS, size, generator=torch.Generator().manual_seed(1))
    return KeyOffset(vectors=300 * torch.nn.functional.normalize(drawn, dim=-1), rotation=rotation)


def drawn(*shape: int, state: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(state))


def coded(kind: str, layout: Layout, text: str, first: Tensor | None = None, **more: Any) -> tuple[Any, StoredSides]:
    """Keys in codes without their constant, which stands in their place, whatever they were."""
    offset = replace(offset_of(kind), **more)
    codec = Plan.parse(f"centred(of={text})").encode
    bound = codec.for_layer(CodecContext(layer=0, layers=1, heads=HEADS, offset=offset))
    keys, values = (drawn(layout.lanes, layout.size, KINDS[kind][0], state=state) for state in (2, 3))
    # Codes that C++ makes begin as bytes, which cannot be poisoned.
    with dispatch.using("reference"):
        part = bound.encode(layout, keys, values, first)
    own = stored_sides(part)
    assert own is not None and own.offsetting is not None
    return part, own


def constants(kind: str, layout: Layout, first: Tensor | None) -> Tensor:
    """(m, s, d) float64, one plane after the other."""
    offset, owners = offset_of(kind), layout.owners(torch.device("cpu"))
    places = layout.columns(torch.device("cpu")).expand(layout.lanes, layout.size).double()
    if first is not None:
        places = places - first[:, None]
    found = offset.vectors.double()[owners % HEADS][:, None].repeat(1, layout.size, 1)
    still = found.clone()
    frequencies = () if offset.rotation is None else offset.rotation.frequencies.double().tolist()
    for plane, frequency in enumerate(frequencies):
        assert offset.rotation is not None
        a, b = (2 * plane, 2 * plane + 1) if offset.rotation.interleaved else (plane, plane + len(frequencies))
        cos, sin = (places * frequency).cos(), (places * frequency).sin()
        one, two = still[..., a], still[..., b]
        found[..., a], found[..., b] = one * cos - two * sin, two * cos + one * sin
    return found


def truth(query: Tensor, part: Any, kind: str, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Sums and lse of each owner's queries (n, g, t, d) in float64."""
    stored, values = part.inner.decode()
    keys, owners = stored.double() + constants(kind, part.layout, part.first), part.layout.owners(torch.device("cpu"))
    outs, all_lse = [], []
    for owner in range(query.shape[0]):
        mine = [lane for lane in range(part.layout.lanes) if int(owners[lane]) == owner]
        k = torch.cat([keys[lane, : lengths(part.layout, lane)] for lane in mine])
        v = torch.cat([values[lane, : lengths(part.layout, lane)] for lane in mine]).double()
        logits = query[owner].double() @ k.T * SCALING
        logits = logits if cap is None else cap * (logits / cap).tanh()
        outs.append(logits.softmax(-1) @ v)
        all_lse.append(logits.logsumexp(-1))
    return torch.stack(outs), torch.stack(all_lse)


def lengths(layout: Layout, lane: int) -> int:
    return layout.size if layout.lengths is None else int(layout.lengths[lane])


def read(query: Tensor, own: StoredSides, library: Library, **how: Any) -> tuple[Tensor, Tensor]:
    layout = own.layout
    found = attend_coded(
        AttentionInputs(
            own.map_query(query),
            own.keys,
            own.values,
            scaling=SCALING,
            owner=layout.owner,
            lengths=layout.lengths,
            offset=(own.offsetting, query),
            **how,
        ),
        using=library,
    )
    return own.map_output(*found, query, own.logit_shift(query, SCALING))


def near(found: tuple[Tensor, ...], expected: tuple[Tensor, Tensor]) -> bool:
    # Logits are some hundred: float32 has five digits behind the point.
    return all(float((one - two).abs().max()) < 1e-3 for one, two in zip(found, expected, strict=True))


def scattered(rows: int, size: int, lanes_of: list[int] | None = None) -> Layout:
    """Every third column or so, as after an eviction; with several lanes for a head where they are told."""
    owner = None if lanes_of is None else torch.tensor([o for o, count in enumerate(lanes_of) for _ in range(count)])
    lanes = rows * HEADS if owner is None else len(owner)
    steps = torch.randint(1, 6, (lanes, size), generator=torch.Generator().manual_seed(4))
    steps[:, size // 2 : size // 2 + 40] = 1
    positions, filled = steps.cumsum(1), None
    if owner is not None:
        filled = torch.full((lanes,), size, dtype=torch.int32)
        for lane in range(1, lanes):
            if owner[lane] == owner[lane - 1]:
                positions[lane] += positions[lane - 1, -1]
        filled[-1] = size - 5
    return Layout(rows=rows, heads=HEADS, size=size, positions=positions.int(), owner=owner, lengths=filled)


LAYOUTS = {
    "one block": Layout(rows=1, heads=HEADS, size=63, start=0),
    "far, between blocks": Layout(rows=1, heads=HEADS, size=700, start=90_017),
    "evicted": scattered(2, 300),
}


@every_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", LAYOUTS)
def test_logits_get_the_products_with_the_constant(library: Library, kind: str, where: str) -> None:
    layout = LAYOUTS[where]
    query = drawn(layout.rows * HEADS, 7, 1, KINDS[kind][0], state=5)
    part, own = coded(kind, layout, "vector(bits=4, block_size=1)")
    expected = truth(query, part, kind)
    assert near(read(query, own, library), expected)
    # Another sign, head or position is another answer.
    vectors = own.offsetting.offset.vectors if own.offsetting is not None else query
    wrong = [{"vectors": -vectors}, {"vectors": vectors.roll(1, 0)}]
    for each in wrong:
        assert not near(read(query, coded(kind, layout, "vector(bits=4, block_size=1)", **each)[1], library), expected)
    if layout.start is not None and KINDS[kind][1] is not None:
        late = replace(layout, start=layout.start + 1)
        moved = own._replace(offsetting=own.offsetting._replace(layout=late))
        assert not near(read(query, moved, library), expected)


@every_variant
@pytest.mark.parametrize("text", [ROTATED, "kivi(bits=4, group=8, recent=0)"])
def test_padding_caps_and_several_new_tokens(library: Library, text: str) -> None:
    layout, first = Layout(rows=3, heads=HEADS, size=264, start=40), torch.tensor([0, 300, 51])
    query = drawn(3 * HEADS, 3, 5, 64, state=5)
    part, own = coded("halves", layout, text, first)
    assert part.first is not None and len(part.first.unique()) > 1
    for cap in (None, 2.0):
        assert near(read(query, own, library, softcap=cap), truth(query, part, "halves", cap))


@every_variant
def test_pages_of_heads_and_their_mass(library: Library) -> None:
    layout = scattered(2, 48, lanes_of=[3, 1, 2, 2])
    query = drawn(2 * HEADS, 4, 1, 64, state=5)
    part, own = coded("halves", layout, "vector(bits=4, block_size=1)")
    expected = truth(query, part, "halves")
    assert near(read(query, own, library), expected)
    how: dict[str, Any] = {"owner": layout.owner, "lengths": layout.lengths, "offset": (own.offsetting, query)}
    out, lse, kept = attend_and_keep(
        AttentionInputs(query, own.keys, own.values, scaling=SCALING, **how), using=library
    )
    mass = kept.mass(lse, torch.ones(2 * HEADS, 1))
    assert near((out, lse), expected) and float((mass.sum() - 4 * 2 * HEADS).abs()) < 1e-3


@pytest.mark.parametrize("text", ["vector(bits=4, block_size=1)", ROTATED])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_attention_is_that_over_decoded_keys(text: str, cap: float | None) -> None:
    """Between a part in codes and the tail, with and without mass."""
    layout, first = Layout(rows=2, heads=HEADS, size=520, start=0), torch.tensor([0, 17])
    part, _ = coded("halves", layout, text, first)
    tail = Layout(rows=2, heads=HEADS, size=9, start=520)
    keys, values = drawn(4, 9, 64, state=6), drawn(4, 9, 64, state=7)
    parts = [part, PlainSegment(layout=tail, keys=keys, values=values)]
    query = drawn(2, 6, 1, 64, state=5)
    sees = Padded(new_tokens=1, first_column=528, real=torch.arange(529) >= first[:, None])
    softmax = Softmax(softcap=cap)
    for weight in (None, torch.ones(2, 1)):
        found = read_all(query, parts, sees, SCALING, weight, softmax)
        with dispatch.using("reference"):
            expected = read_all(query, parts, sees, SCALING, weight, softmax)
        assert float((found.output - expected.output).abs().max()) < 1e-3
        for one, two in zip(found.mass or [], expected.mass or [], strict=True):
            assert float((one - two).abs().max()) < 1e-3


def test_what_turns_keys_and_what_mixes_them_outside_is_decoded() -> None:
    layout = Layout(rows=1, heads=HEADS, size=40, start=0)
    offset = offset_of("halves")
    codec = Plan.parse("unrotated(of=centred(of=vector(bits=4, block_size=1)))").encode
    bound = codec.for_layer(CodecContext(layer=0, layers=1, heads=HEADS, offset=offset, rotation=offset.rotation))
    with dispatch.using("reference"):
        part = bound.encode(layout, drawn(2, 40, 64), drawn(2, 40, 64))
    assert stored_sides(part) is None
