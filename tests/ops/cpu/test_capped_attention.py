"""Capped logits in the C++ kernels and in torch's folded form, against attention in float64; and sinks beside parts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.ops.cpu.coded_layouts import COARSE, LAYOUTS, every_dtype, every_variant, exact, needs_built, states_of
from tests.ops.cpu.coded_truth import same, truth

from kvtailor.ops.attention import folded_codes
from kvtailor.ops.attention.cpu import attention
from kvtailor.ops.attention.cpu.attention import attend_and_keep, attend_coded
from kvtailor.ops.attention.folded import merge
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole

CAP = 0.6
# Plain states, floats, codes of levels and of pairs, and signs are decoded where there are no kernels.
NOT_FOLDED = ("plain", "levels", "grid", "signs", "nv", "mx", "fp", "fitted")
# (n, g, t, s, d): 63 slots, odd heads, sizes that no vector divides, several blocks and pieces.
SIZES = [(2, 4, 1, 63, 128), (3, 1, 1, 600, 64), (3, 3, 5, 130, 24), (1, 7, 2, 1030, 80), (1, 1, 16, 1, 96)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN."""
    empty = torch.empty
    for module in (attention, folded_codes):
        monkeypatch.setattr(module.torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))


@needs_built
@every_variant
@every_dtype
@pytest.mark.parametrize("layout", ["plain", "vector8", "vector4", "tokens2", "channels4", "channels2"])
def test_every_kind_of_layout(library: Library, dtype: torch.dtype, layout: str) -> None:
    tolerance = 1e-5 if dtype == torch.float32 or layout == "plain" else COARSE
    for seed, (n, g, t, s, d) in enumerate(SIZES):
        keys, values = (LAYOUTS[layout](states) for states in states_of(seed, dtype, n, s, d))
        query = torch.randn((n, g, t, d), generator=torch.Generator().manual_seed(9))
        expected = truth(query, keys, values, softcap=CAP)
        assert same(
            attend_coded(AttentionInputs(query, keys, values, scaling=0.1, softcap=CAP), using=library),
            expected,
            tolerance,
        )
        if s > 1:
            assert not same(
                attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library), expected, 10 * tolerance
            )
        # A cap that no logit comes near changes nothing but rounding, and none at all changes no bit.
        plain = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        wide = plain[0].double(), plain[1].double()
        assert same(
            attend_coded(AttentionInputs(query, keys, values, scaling=0.1, softcap=1e5), using=library), wide, 2e-5
        )
        again = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, softcap=None), using=library)
        assert all(map(torch.equal, plain, again))


@needs_built
@every_variant
@pytest.mark.parametrize("layout", ["plain", "tokens4", "channels4"])
def test_masks_and_weights_come_after_the_cap(library: Library, layout: str) -> None:
    keys, values = (LAYOUTS[layout](states) for states in states_of(3, torch.float32, 4, 300, 64))
    state = torch.Generator().manual_seed(5)
    query = torch.randn((4, 2, 3, 64), generator=state)
    visible = torch.rand((4, 3, 300), generator=state) < 0.2
    visible[0, 0] = False
    log_weight = torch.rand((4, 300), generator=state) * 3
    how = {"visible": visible, "log_weight": log_weight}
    expected = truth(query, keys, values, **how, softcap=CAP)
    for attend in (partial(attend_coded, using=library), folded_codes.attend_coded):
        if attend is folded_codes.attend_coded and layout == "plain":
            continue
        assert same(attend(AttentionInputs(query, keys, values, scaling=0.1, softcap=CAP, **how)), expected, 1e-4)


@needs_built
@every_variant
@pytest.mark.parametrize("layout", ["plain", "vector8", "channels4"])
def test_mass_of_capped_logits_beside_a_sink(library: Library, layout: str) -> None:
    """Two parts and a sink for each query head: one softmax over all of them, written down in float64."""
    state = torch.Generator().manual_seed(5)
    query, counts = torch.randn((2, 3, 2, 64), generator=state), torch.rand((2, 2), generator=state)
    sinks = torch.randn((2, 3, 1), generator=state) * 2
    parts = [
        tuple(LAYOUTS[layout](states) for states in states_of(seed, torch.float32, 2, slots, 64))
        for seed, slots in ((1, 63), (2, 300))
    ]
    found = [
        attend_and_keep(AttentionInputs(query, *sides, scaling=0.1, softcap=CAP), using=library) for sides in parts
    ]
    out, lse = merge([each[:2] for each in found], sinks)
    keys, values = (torch.cat([exact(sides[i]) for sides in parts], 1).double() for i in range(2))
    logits = torch.einsum("ngtd,nsd->ngts", query.double(), keys) * 0.1
    logits = torch.cat([CAP * (logits / CAP).tanh(), sinks.double()[..., None].expand(2, 3, 2, 1)], -1)
    shares = logits.softmax(-1)[..., :-1]
    assert torch.allclose(lse.double(), logits.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out.double(), torch.einsum("ngts,nsd->ngtd", shares, values), atol=1e-5)
    mass = torch.cat([kept.mass(lse, counts) for *_, kept in found], 1)
    assert torch.allclose(mass.double(), torch.einsum("ngts,nt->ns", shares, counts.double()), atol=1e-5)


@needs_built
@every_variant
def test_the_kernels_tanh_is_within_4e_7(library: Library) -> None:
    """One token with the logit x, beside one with the logit 0: their log-sum-exp gives what tanh made of x."""
    at = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-6, 1, 800), torch.tensor([0.0, 1e30, -1e30])])
    keys = torch.zeros(at.shape[0], 1, 16)
    keys[:, 0, 0] = at
    query = torch.zeros(at.shape[0], 1, 1, 16)
    query[..., 0] = 1.0
    sides = Whole(states=keys), Whole(states=keys)
    # The log-sum-exp of a single token is its logit.
    _, lse = attend_coded(AttentionInputs(query, *sides, scaling=1.0, softcap=1.0), using=library)
    exactly = at.double().tanh()
    found = lse.flatten().double()
    assert float((found - exactly).abs().max()) < 4e-7
    small = at.abs() > 0
    assert float(((found - exactly)[small] / exactly[small]).abs().max()) < 6e-7
    assert float(found.abs().max()) <= 1 + 4e-7
    # What is no number stays none.
    keys[0, 0, 0] = torch.nan
    assert attend_coded(AttentionInputs(query, *sides, scaling=1.0, softcap=1.0), using=library)[1][0].isnan().all()


@every_dtype
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith(NOT_FOLDED)])
def test_folded_in_torch(dtype: torch.dtype, layout: str) -> None:
    keys, values = (LAYOUTS[layout](states) for states in states_of(3, dtype, 3, 63, 64))
    query = torch.randn((3, 2, 2, 64), generator=torch.Generator().manual_seed(9))
    found = folded_codes.attend_coded(AttentionInputs(query, keys, values, scaling=0.1, softcap=CAP))
    assert same(found, truth(query, keys, values, softcap=CAP), 1e-4)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_sink_joins_parts_as_one_more_key(parts: int) -> None:
    """Large sinks and blind queries included; without sinks nothing changes."""
    state = torch.Generator().manual_seed(2)
    logits = [torch.randn((4, 2, 3, 5), generator=state) * 8 for _ in range(parts)]
    for each in logits:
        each[0, 0] = -torch.inf
    values = [torch.randn((4, 2, 5, 6), generator=state) for _ in range(parts)]
    found = [
        ((each.softmax(-1).nan_to_num(0.0) @ value), each.logsumexp(-1))
        for each, value in zip(logits, values, strict=True)
    ]
    sinks = torch.tensor([[-200.0, 100.0], [0.0, 3.0], [-5.0, 30.0], [1.0, -torch.inf]])[..., None]
    out, lse = merge([(one.clone(), other) for one, other in found], sinks)
    whole = torch.cat([*logits, sinks[..., None].expand(4, 2, 3, 1)], -1).double()
    shares = whole.softmax(-1)[..., :-1].split(5, -1)
    expected = sum(share @ value.double() for share, value in zip(shares, values, strict=True))
    assert torch.allclose(out.double(), expected, atol=1e-5) and torch.allclose(lse.double(), whole.logsumexp(-1))
    assert bool((out[0, 0] == 0).all())
