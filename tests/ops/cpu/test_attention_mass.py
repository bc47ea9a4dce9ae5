"""The attention that each slot receives, by the C++ kernels, against probabilities in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.cpu.coded_layouts import COARSE, LAYOUTS, every_variant, exact, needs_built, states_of, width_of
from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.ops.attention import folded_codes
from kvtailor.ops.attention.cpu import attention
from kvtailor.ops.attention.cpu.attention import attend_and_keep, attend_coded
from kvtailor.ops.attention.definition import reference
from kvtailor.ops.attention.folded import merge
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded

pytestmark = needs_built


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN."""
    empty = torch.empty
    monkeypatch.setattr(attention.torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))


def truth(
    query: Tensor, keys: Tensor, counts: Tensor, visible: Tensor | None = None, log_weight: Tensor | None = None
) -> Tensor:
    """(n, s) from keys (n, s, d) of an owner each, as the definition says it."""
    owners, group, new, size = query.shape
    rows = query.double().reshape(1, owners * group, new, size)
    mask = None if visible is None else visible[None]
    raised = None if log_weight is None else log_weight[None].double()
    _, _, weights = reference(rows, keys[None].double(), keys[None].double(), mask, 0.1, raised)
    return torch.einsum("ngts,nt->ns", weights[0], counts.double())


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether the whole is within the tolerance; what receives nothing receives exactly nothing."""
    error = (found.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return bool(error <= tolerance) and torch.equal(found == 0, expected < 1e-37)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["plain", "vector8", "vector3", "tokens4", "channels4", "channels2"])
def test_every_kind_of_layout(library: Library, dtype: torch.dtype, layout: str) -> None:
    for seed, (owners, group, new, slots, size) in enumerate(
        [(3, 4, 1, 63, 64), (2, 3, 5, 600, 24), (1, 1, 16, 257, 80)]
    ):
        keys, values = (LAYOUTS[layout](states) for states in states_of(seed, dtype, owners, slots, size))
        state = torch.Generator().manual_seed(seed)
        query, counts = (
            torch.randn((owners, group, new, size), generator=state),
            torch.rand(owners, new, generator=state),
        )
        counts[0, 0] = 0
        out, lse, kept = attend_and_keep(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        plain = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
        tolerance = 1e-5 if dtype == torch.float32 or layout == "plain" else 2 * COARSE
        assert close(kept.mass(lse, counts), truth(query, exact(keys), counts), tolerance), slots


@every_variant
@pytest.mark.parametrize("layout", ["plain", "vector8", "tokens2", "channels4"])
def test_what_is_seen_and_how_much_it_counts(library: Library, layout: str) -> None:
    keys, values = (LAYOUTS[layout](states) for states in states_of(3, torch.float32, 4, 700, 64))
    state = torch.Generator().manual_seed(5)
    query, counts = torch.randn((4, 2, 3, 64), generator=state), torch.rand((4, 3), generator=state)
    visible, log_weight = torch.rand((4, 3, 700), generator=state) < 0.2, torch.rand((4, 700), generator=state) * 3
    # A block that no query sees, a query that sees nothing, and a lane that no query sees.
    visible[1, :, 256:512] = visible[0, 0] = visible[2] = False
    _, lse, kept = attend_and_keep(
        AttentionInputs(query, keys, values, scaling=0.1, visible=visible, log_weight=log_weight), using=library
    )
    mass = kept.mass(lse, counts)
    assert close(mass, truth(query, exact(keys), counts, visible, log_weight), 1e-5)
    assert (mass[1, 256:512] == 0).all() and (mass[2] == 0).all()


@every_variant
@pytest.mark.parametrize("layout", ["plain", "vector4", "channels2"])
def test_ragged_lanes_give_their_filled_slots_alone(library: Library, layout: str) -> None:
    pages, lengths = [3, 0, 1, 5], torch.tensor([64, 64, 7, 1, 64, 64, 64, 64, 33], dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(pages))
    keys, values = (LAYOUTS[layout](states) for states in states_of(4, torch.float32, 9, 64, 32))
    query, counts = torch.randn(4, 3, 2, 32), torch.rand(4, 2)
    _, lse, kept = attend_and_keep(
        AttentionInputs(query, keys, values, scaling=0.1, owner=owner, lengths=lengths), using=library
    )
    mass = kept.mass(lse, counts)
    for mine in (0, 2, 3):
        lanes = [lane for lane in range(9) if owner[lane] == mine]
        wanted = truth(
            query[mine : mine + 1],
            torch.cat([exact(keys)[lane, : lengths[lane]] for lane in lanes])[None],
            counts[mine : mine + 1],
        )[0]
        assert close(torch.cat([mass[lane, : lengths[lane]] for lane in lanes]), wanted, 1e-5)
    assert all((mass[lane, length:] == 0).all() for lane, length in enumerate(lengths.tolist()))


@every_variant
def test_parts_share_one_softmax(library: Library) -> None:
    states = states_of(6, torch.float32, 2, 500, 64)
    query, counts = torch.randn(2, 4, 2, 64), torch.rand(2, 2)
    parts: list[tuple[Coded, Coded]] = []
    for name, cut in (("channels4", slice(0, 300)), ("plain", slice(300, 500))):
        keys, values = (LAYOUTS[name](side[:, cut]) for side in states)
        parts.append((keys, values))
    found = [attend_and_keep(AttentionInputs(query, *sides, scaling=0.1), using=library) for sides in parts]
    _, lse = merge([each[:2] for each in found])
    mass = torch.cat([kept.mass(lse, counts) for _, _, kept in found], 1)
    assert close(mass, truth(query, torch.cat([exact(keys) for keys, _ in parts], 1), counts), 1e-5)


@every_variant
def test_threads_change_nothing(library: Library, threads: int) -> None:
    keys, values = (LAYOUTS["vector8"](states) for states in states_of(10, torch.bfloat16, 3, 3000, 64))
    query, counts = torch.randn(3, 4, 1, 64), torch.rand(3, 1)
    _, lse, kept = attend_and_keep(AttentionInputs(query, keys, values, scaling=0.1), using=library)
    assert close(kept.mass(lse, counts), truth(query, exact(keys), counts), 2 * COARSE)


@every_variant
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_shape(library: Library, data: st.DataObject) -> None:
    draw = data.draw
    owners, group, new, slots = (draw(st.integers(1, most)) for most in (3, 9, 16, 600))
    size, layout = draw(st.integers(1, 9)) * 8, draw(st.sampled_from(sorted(LAYOUTS)))
    seed = draw(st.integers(0, 10**6))
    keys, values = (LAYOUTS[layout](states) for states in states_of(seed, torch.float32, owners, slots, size))
    state = torch.Generator().manual_seed(seed)
    query = torch.randn((owners, group, new, width_of(keys)), generator=state)
    counts = torch.rand((owners, new), generator=state)
    visible = torch.rand((owners, new, slots), generator=state) < draw(st.sampled_from([0.01, 0.8]))
    _, lse, kept = attend_and_keep(AttentionInputs(query, keys, values, scaling=0.1, visible=visible), using=library)
    assert close(kept.mass(lse, counts), truth(query, exact(keys), counts, visible), 1e-5)


def test_where_none_was_built_none_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    side = LAYOUTS["vector8"](states_of(1, torch.bfloat16, 2, 20, 32)[0])
    query = torch.randn(2, 4, 1, 32)
    assert dispatch.coded_attention(query, side, side, mass=True) is attend_and_keep
    with dispatch.using("reference"):
        assert dispatch.coded_attention(query, side, side, mass=True) is None
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert dispatch.coded_attention(query, side, side, mass=True) is None
    assert dispatch.coded_attention(query, side, side) is folded_codes.attend_coded
