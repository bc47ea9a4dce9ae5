"""A prompt and what each slot received of its attention, by the C++ kernel, against float64 and the plain form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.cpu.coded_layouts import every_dtype
from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.ops.attention.cpu.prompt import attend_with_mass, unsuited_prompt
from kvtailor.ops.attention.prompt import with_mass
from kvtailor.ops.cpu.library import Library, built, load
from kvtailor.types import Softmax

_LOADED = [each for each in map(load, built().values()) if each is not None]
_STATES = torch.zeros(1, 1, 1, 8)
_SUITED = [each for each in _LOADED if unsuited_prompt(_STATES, _STATES, _STATES, each) is None]
pytestmark = [
    pytest.mark.skipif(not _SUITED, reason="no variant that has this kernel was built or runs here"),
    pytest.mark.usefixtures("poisoned"),
]
every_suited = pytest.mark.parametrize("library", _SUITED, ids=lambda each: each.variant)
# (b, h, g, t, n, d, dv): one query, odd sizes, several tiles and blocks, the next piece of a prompt, a group of more
# rows than a block has, and a prompt whose weights leave a block few rows.
SIZES = [
    (1, 1, 1, 1, 1, 8, 8),
    (2, 3, 2, 17, 80, 20, 24),
    (1, 2, 3, 300, 300, 64, 64),
    (1, 1, 7, 130, 571, 33, 5),
    (1, 1, 200, 3, 90, 16, 17),
    (1, 1, 2, 40, 60_000, 8, 8),
]


def states_in_a_poisoned_buffer(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random states (b, h, n, d), head beside head for each slot as models lay them, with NaN all around."""
    b, h, n, d = shape
    buffer = torch.full((b, n + 3, h, d + 2), torch.nan, dtype=dtype)
    states = buffer[:, 1 : n + 1, :, 1 : d + 1]
    states.copy_(torch.randn((b, n, h, d), generator=generator))
    return states.transpose(1, 2)


def truth(
    query: Tensor, keys: Tensor, values: Tensor, weight: Tensor, sinks: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Outputs (b, q, t, dv) and mass (b, h, n) as the definition says them, in float64."""
    (b, q, t, _), (h, n) = query.shape, keys.shape[1:3]
    widened = [each.double().repeat_interleave(q // h, 1) for each in (keys, values)]
    logits = scaling * query.double() @ widened[0].transpose(-1, -2)
    logits.masked_fill_(~torch.ones(t, n, dtype=torch.bool).tril(n - t), -torch.inf)
    own = torch.full((q,), -torch.inf) if sinks is None else sinks
    logits = torch.cat([logits, own.double()[None, :, None, None].expand(b, q, t, 1)], -1)
    shares = logits.softmax(-1)[..., :-1]
    return shares @ widened[1], torch.einsum("bhgtn,bt->bhn", shares.view(b, h, q // h, t, n), weight.double())


@every_suited
@every_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("sunk", [False, True], ids=["plain", "sinks"])
def test_every_size_against_float64(
    library: Library, dtype: torch.dtype, size: tuple[int, ...], sunk: bool, threads: int
) -> None:
    b, h, g, t, n, d, dv = size
    generator = torch.Generator().manual_seed(n + t)
    shapes = (b, h * g, t, d), (b, h, n, d), (b, h, n, dv)
    query, keys, values = (states_in_a_poisoned_buffer(*each, dtype=dtype, generator=generator) for each in shapes)
    weight = torch.rand((b, t), generator=generator)
    weight[:, : t // 3] = 0
    sinks = torch.randn(h * g, generator=generator) * 4 if sunk else None
    out, mass = attend_with_mass(query, keys, values, 0.3, weight, sinks, using=library)
    expected, received = truth(query, keys, values, weight, sinks, 0.3)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert out.dtype == dtype and mass.dtype == torch.float32
    assert torch.allclose(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.allclose(mass.double(), received, atol=1e-5, rtol=1e-5)


@every_suited
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_size_gives_what_the_plain_form_gives(library: Library, data: st.DataObject) -> None:
    b, h, g, d, dv = (data.draw(st.integers(1, most)) for most in (2, 3, 5, 70, 40))
    t = data.draw(st.integers(1, 120))
    n = t + data.draw(st.integers(0, 400))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    query, keys, values = (
        torch.randn(shape, generator=generator) for shape in ((b, h * g, t, d), (b, h, n, d), (b, h, n, dv))
    )
    weight = torch.rand((b, t), generator=generator)
    # Loud enough for most of a softmax to lie on one slot, and for logits that exp would not take as they are.
    scaling = data.draw(st.sampled_from([0.05, 1.0, 30.0]))
    out, mass = attend_with_mass(query, keys, values, scaling, weight, using=library)
    with dispatch.using("reference"):
        expected, received = with_mass(query, keys, values, scaling, weight, None)
    # Products of 30 times the size are rounded 30 times as coarsely in both.
    tolerance = 1e-5 * max(1.0, scaling) * d**0.5
    assert torch.allclose(out, expected, atol=tolerance, rtol=tolerance)
    assert torch.allclose(mass, received, atol=tolerance * max(1, g), rtol=tolerance)


@every_suited
def test_threads_change_nothing(library: Library) -> None:
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn((1, heads, 700, 32), generator=generator) for heads in (6, 3, 3))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(attend_with_mass(query, keys, values, 0.2, torch.ones(1, 700), using=library))
    finally:
        torch.set_num_threads(before)
    for out, mass in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(mass, found[0][1])


def test_a_prompt_takes_it_and_what_it_cannot_do_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys = torch.randn(1, 4, 70, 16), torch.randn(1, 2, 70, 16)
    monkeypatch.setattr(dispatch, "library", lambda: _SUITED[0])
    assert dispatch.prompt_mass(query, keys, keys) is not None
    assert dispatch.prompt_mass(query, keys, keys.bfloat16()) is None
    assert dispatch.prompt_mass(query.double(), keys.double(), keys.double()) is None
    with dispatch.using("reference"):
        assert dispatch.prompt_mass(query, keys, keys) is None
    others = [each for each in _LOADED if each not in _SUITED]
    assert all("built for" in (unsuited_prompt(query, keys, keys, each) or "") for each in others)
    # Capped logits and other masks have the plain form.
    monkeypatch.setattr(dispatch, "prompt_mass", None)
    with_mass(query, keys, keys, 0.2, torch.ones(1, 70), None, Softmax(softcap=5.0))
    with_mass(query, keys, keys, 0.2, torch.ones(1, 70), lambda row, first, end: torch.ones(1, end - first, 70) > 0)


@every_suited
def test_nothing_to_read_is_not_for_the_kernel(library):
    query, keys = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 0, 8)
    assert unsuited_prompt(query, keys, keys, library) == "there is nothing to read"
    assert unsuited_prompt(query[:, :, :0], keys.new_zeros(1, 1, 4, 8), keys.new_zeros(1, 1, 4, 8), library) is not None
    assert unsuited_prompt(query, *(torch.zeros(1, 1, 4, 8) for _ in range(2)), library) is None
