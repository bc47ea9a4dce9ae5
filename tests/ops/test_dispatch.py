"""What runs where, and that the reference can be forced."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, needs_triton

from kvtailor.ops import dispatch
from kvtailor.ops.attention.cpu.choose import attend_pages
from kvtailor.ops.attention.cpu.prompt import MASS_VARIANTS
from kvtailor.ops.codes.floats import MxCodes
from kvtailor.ops.codes.grids import GridCodes
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.cpu.library import built, library
from kvtailor.ops.dispatch import (
    coded_attention,
    forced,
    joint_attention,
    page_attention,
    page_bounds,
    prompt_mass,
    quantiser,
    using,
)
from kvtailor.ops.segments.coded import Whole
from kvtailor.ops.what_runs import explained

CPU = torch.device("cpu")
SIDE = Whole(states=torch.randn(2, 8, 16))
needs_built = pytest.mark.skipif(not built(), reason="the C++ kernels were not built: no compiler")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTAILOR_IMPLEMENTATION", raising=False)


@needs_built
def test_few_tokens_on_the_cpu_have_a_kernel() -> None:
    assert coded_attention(torch.randn(2, 1, 1, 16), SIDE, SIDE) is not None
    assert coded_attention(torch.randn(2, 1, dispatch.MOST_QUERIES, 16), SIDE, SIDE) is not None
    assert coded_attention(torch.randn(2, 1, dispatch.MOST_QUERIES + 1, 16), SIDE, SIDE) is None
    wide = Whole(states=SIDE.states.double())
    assert coded_attention(torch.randn(2, 1, 1, 16), wide, wide) is None
    elsewhere = Whole(states=SIDE.states.to("meta"))
    assert coded_attention(torch.randn(2, 1, 1, 16, device="meta"), elsewhere, elsewhere) is None


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(2, 1, 1, 16)
    with using("reference"):
        assert coded_attention(query, SIDE, SIDE) is None
        assert [each.why for each in explained(CPU, torch.float32)] == ["the reference is forced"]
        with using("auto"):
            assert forced() == "auto"
    monkeypatch.setenv("KVTAILOR_IMPLEMENTATION", "reference")
    assert coded_attention(query, SIDE, SIDE) is None
    with using("auto"):
        assert (coded_attention(query, SIDE, SIDE) is None) is not built()


@needs_built
def test_codes_are_made_by_a_kernel_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(2, 8, 16)
    fast = quantiser(states)
    assert fast.channels != ChannelCodes.of
    for other in (states.double(), states.to("meta")):
        assert quantiser(other).channels == ChannelCodes.of
    with using("reference"):
        assert quantiser(states).channels == ChannelCodes.of
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert quantiser(states).channels == ChannelCodes.of


@needs_built
def test_pages_are_read_in_place_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    query, bounds = torch.randn(2, 1, 1, 16), torch.zeros(2, 3, 16)
    found = page_attention(query, SIDE, SIDE, 6)
    assert isinstance(found, partial) and found.func is attend_pages
    assert page_attention(query.expand(2, 1, dispatch.MOST_QUERIES + 1, 16), SIDE, SIDE, 4) is None
    assert page_bounds(query[:, 0], bounds, bounds) is not None
    assert page_bounds(query[:, 0], bounds, bounds.half()) is None
    with using("reference"):
        assert page_attention(query, SIDE, SIDE, 4) is None and page_bounds(query[:, 0], bounds, bounds) is None
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert page_attention(query, SIDE, SIDE, 4) is None and page_bounds(query[:, 0], bounds, bounds) is None


@needs_triton
def test_kernels_of_gpus_run_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, and in the interpreter, where the CPU counts as one."""
    from kvtailor.ops.attention.triton.attend import attend_coded, attend_parts
    from kvtailor.ops.attention.triton.attend import attend_pages as attend_on_gpu
    from kvtailor.ops.attention.triton.mass import attend_and_keep, attend_with_mass

    query, side = torch.randn(2, 1, 1, 16, device=DEVICE), Whole(states=SIDE.states.to(DEVICE))
    prompt = torch.randn(1, 2, 8, 16, device=DEVICE).half()
    assert joint_attention(query.device) is None
    assert prompt_mass(prompt, prompt, prompt) is not attend_with_mass
    with using("reference"):
        assert page_attention(query, side, side, 4) is None
        assert prompt_mass(prompt, prompt, prompt) is None
    with using("triton"):
        assert coded_attention(query, side, side) is attend_coded
        assert joint_attention(query.device).attend_parts is attend_parts
        assert joint_attention(query.device).attend_coded is attend_coded
        assert coded_attention(query, side, side, mass=True) is attend_and_keep
        codes = quantiser(side.states).tokens(side.states, 4, 16)
        assert coded_attention(query, codes, side, mass=True) is None
        assert coded_attention(query, side, codes, mass=True) is attend_and_keep
        assert page_attention(query, side, side, 4) is attend_on_gpu
        assert page_attention(query, side, side, 6) is None
        assert page_attention(query.expand(2, 1, dispatch.MOST_QUERIES + 1, 16), side, side, 4) is None
        assert prompt_mass(prompt, prompt, prompt) is attend_with_mass
        assert prompt_mass(prompt, prompt, prompt.float()) is None
        told = explained(torch.device(DEVICE), torch.float16)
        assert sum("Triton" in each.implementation for each in told) == 6
        if DEVICE == "cpu":
            half = Whole(states=side.states.bfloat16())
            assert coded_attention(query, half, half) is None, "the interpreter multiplies them wrongly"
            monkeypatch.setattr(dispatch, "interpreting", lambda: False)
            assert page_attention(query, side, side, 4) is None
            assert not any("Triton" in each.implementation for each in explained(CPU, torch.float16))


@needs_triton
def test_codes_are_made_by_triton_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtailor.ops.triton_launch import Launch

    states, launched, launch = torch.randn(2, 9, 16).to(DEVICE), [], Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda call: (launched.append(call), launch(call)))
    apart = states.transpose(1, 2).contiguous().transpose(1, 2)
    with using("triton"):
        packed = quantiser(states)
        for given, bits, runs in ((states, 4, 3), (states, 3, 0), (apart, 4, 0)):
            launched.clear()
            made = packed.tokens(given, bits, 8), packed.symmetric(given, bits), packed.channels(given, bits, 4)
            assert len(launched) == runs
            its = given.to(CPU)
            wanted = TokenCodes.of(its, bits, 8), TokenCodes.symmetric(its, bits), ChannelCodes.of(its, bits, 4)
            for codes, other in zip(made, wanted, strict=True):
                tensors = other.tensors()
                assert all(torch.equal(tensor.to(CPU), tensors[name]) for name, tensor in codes.tensors().items())


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'fast' is none of auto, reference, triton"), using("fast"):
        pass
    monkeypatch.setenv("KVTAILOR_IMPLEMENTATION", "slow")
    with pytest.raises(ValueError, match=r"KVTAILOR_IMPLEMENTATION is 'slow', none of"):
        forced()


def test_what_runs_is_explained() -> None:
    few, prompt, *codes = explained(CPU, torch.bfloat16)
    assert few.implementation.startswith("C++, ") is bool(built())
    assert "torch" in prompt.implementation
    used = library()
    ours = (used is not None) + (used is not None and used.variant in MASS_VARIANTS)
    assert [each.implementation.startswith("C++, ") for each in codes] == [True] * ours
    assert "no kernels for mps" in explained(torch.device("mps"), torch.bfloat16)[0].why
    assert "triton" in explained(torch.device("cuda"), torch.bfloat16)[0].why.lower()
    if built():
        assert "float64" in explained(CPU, torch.float64)[0].why


@needs_triton
def test_auto_takes_on_a_gpu_what_has_won_there_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed to choose for one."""
    gpu = torch.device("cuda")
    assert not any(dispatch.on_triton(gpu, each) for each in dispatch.TRITON_OPERATIONS)
    monkeypatch.setattr(dispatch, "WON_ON_CUDA", frozenset({"attention", "codes"}))
    chosen = [each for each in dispatch.TRITON_OPERATIONS if dispatch.on_triton(gpu, each)]
    assert chosen == ["attention", "codes"]
    forms = [each.implementation for each in explained(gpu, torch.bfloat16)]
    assert forms == ["Triton", "Triton", "torch's fused attention"]
    assert {each.why for each in explained(gpu, torch.bfloat16)[:2]} == {"it was measured to be faster"}
    with using("reference"):
        assert not any(dispatch.on_triton(gpu, each) for each in dispatch.TRITON_OPERATIONS)
    with using("triton"):
        assert all(dispatch.on_triton(gpu, each) for each in dispatch.TRITON_OPERATIONS)
    # What was measured on a GPU says nothing about a CPU, also where Triton's interpreter runs there.
    assert not dispatch.on_triton(CPU, "attention")
    monkeypatch.setattr(dispatch, "WON_ON_CUDA", frozenset({"codes"}))
    first, *_, last = explained(gpu, torch.bfloat16)
    assert first.implementation == "torch, decoded parts" and "not measured to be faster" in first.why
    assert last.operation == "attention of a prompt"


@needs_triton
def test_levels_and_small_floats_are_chosen_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """That codes of whole numbers have won on a GPU does not take kernels that were not measured."""
    from kvtailor.ops.attention.triton.attend import attend_coded, attend_pages

    states, query = torch.randn(1, 16, 32).half().to(DEVICE), torch.zeros(1, 1, 1, 32).half().to(DEVICE)
    sides = {
        "attention": TokenCodes.symmetric(states, 4),
        "levels": GridCodes.of(states, 4, keep_norm=True),
        "small floats": MxCodes.of(states, "e2m1", 32),
    }
    for won in ({"attention", "pages"}, {"attention", "levels"}, {"pages", "small floats"}, {"levels"}):
        monkeypatch.setattr(dispatch, "on_triton", lambda device, operation, won=won: operation in won)
        for name, side in sides.items():
            assert (coded_attention(query, side, side) is attend_coded) is (name in won)
            paged = "pages" in won and (name == "attention" or name in won)
            assert (page_attention(query, side, side, 16) is attend_pages) is paged


def test_what_has_won_is_of_the_operations_there_are() -> None:
    assert set(dispatch.TRITON_OPERATIONS) >= dispatch.WON_ON_CUDA
