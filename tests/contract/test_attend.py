"""What the stage `attend` promises, tested on every method in its folder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.attention_cases import MIXES, SIZES, STILL, case, close, defined, naive, request_of
from tests.support.crossed import crossed
from tests.support.discover import methods_of, sample_of

import kvtailor.attend
import kvtailor.ops.attention.prompt
from kvtailor.attend.contract import Attention
from kvtailor.attend.rolling import Rolling
from kvtailor.attend.segments import Segments
from kvtailor.ops import dispatch
from kvtailor.types import PlainSegment, Rotation, Segment

METHODS = methods_of(kvtailor.attend, Attention)
every_method = pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
with_mass = pytest.mark.parametrize("kind", [k for k in METHODS if k.gives_mass], ids=lambda kind: kind.__name__)
every_mix = pytest.mark.parametrize("mix", MIXES)


def readable(kind: type[Attention], parts: Sequence[Segment]) -> bool:
    return kind.needs_codec is None or kind.needs_codec in {part.codec for part in parts}


def test_the_folder_holds_methods() -> None:
    assert {"Quest", "Reference", "Rocket", "Rolling", "Segments"} <= {kind.__name__ for kind in METHODS}


@every_method
def test_is_a_frozen_keyword_only_dataclass_with_defaults(kind: type[Attention]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert sample_of(kind) == sample_of(kind) and hash(sample_of(kind)) == hash(sample_of(kind))


@every_method
@pytest.mark.parametrize(("size", "what"), crossed(SIZES, list(itertools.product(MIXES, [1, 3, 17, 130]))), ids=str)
def test_equals_the_definition(kind: type[Attention], size: tuple[int, ...], what: tuple[str, int]) -> None:
    """Budgets of the defaults cover what is held here, so every method reads everything."""
    made, out, lse, _ = defined(size, *what)  # type: ignore[arg-type]
    got = sample_of(kind).attend(request_of(made.query, made.parts, made.visible, 0.04, context=STILL))
    assert got.output.shape == out.shape and got.output.dtype == made.query.dtype
    assert close(got.output, out)
    if got.lse is not None:
        assert close(got.lse, lse)
    # What says of itself that several tokens are read as each would be alone never chooses.
    assert got.tokens_read is None or not kind.reads_alike


@every_method
@every_mix
@pytest.mark.parametrize("new", [1, 3, 17, 130])
def test_left_padding_is_exact_and_a_blind_query_gives_zeros(kind: type[Attention], mix: str, new: int) -> None:
    made, out, lse, _ = defined(SIZES[0], mix, new, padded=True, seed=7)
    got = sample_of(kind).attend(request_of(made.query, made.parts, made.visible, 0.04, context=STILL))
    assert bool(got.output.isfinite().all()) and close(got.output, out)
    blind = lse == -torch.inf
    assert bool((got.output[blind] == 0).all())
    if got.lse is not None:
        assert close(got.lse, lse)


@every_method
@pytest.mark.parametrize("mix", ["prompt", "tail", "all"])
@pytest.mark.parametrize("new", [1, 17, 64])
def test_a_window_hides_what_is_older(kind: type[Attention], mix: str, new: int) -> None:
    made, out, *_ = defined(SIZES[0], mix, new, window=30, seed=8)
    got = sample_of(kind).attend(request_of(made.query, made.parts, made.visible, 0.04, context=STILL))
    assert close(got.output, out)


@every_method
@pytest.mark.parametrize("new", [2, 17, 65, 130])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_declared_pass_over_a_first_prompt_is_that_of_all_who_declare_it(
    kind: type[Attention], new: int, padded: bool
) -> None:
    """Bit for bit, and nothing is left behind but output and mass; a cache is filled by another's forward."""
    method = sample_of(kind)
    if method.shared_pass() is None:
        return
    made = case(SIZES[0], "prompt", new, padded=padded, seed=11)
    for mass in (False, True) if kind.gives_mass else (False,):
        asked = request_of(
            made.query,
            made.parts,
            made.visible,
            0.04,
            want_mass=mass,
            real_queries=made.real_queries,
            context=dataclasses.replace(STILL, rotation=Rotation(frequencies=torch.rand(6))),
        )
        got, expected = method.attend(asked), Segments().attend(asked)
        assert torch.equal(got.output, expected.output)
        assert (got.mass is None) == (expected.mass is None)
        assert got.mass is None or all(map(torch.equal, got.mass, expected.mass or []))
        assert got.tokens_read is None and not got.carry


@with_mass
@every_mix
@pytest.mark.parametrize("new", [1, 3, 17, 130])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_mass_is_the_sum_of_the_probabilities(kind: type[Attention], mix: str, new: int, padded: bool) -> None:
    made, out, _, mass = defined(SIZES[0], mix, new, padded=padded, seed=9)
    got = sample_of(kind).attend(
        request_of(
            made.query,
            made.parts,
            made.visible,
            0.04,
            want_mass=True,
            real_queries=made.real_queries,
            context=STILL,
        )
    )
    assert close(got.output, out)
    assert got.mass is not None and len(got.mass) == len(mass)
    for part, found, expected in zip(made.parts, got.mass, mass, strict=True):
        filled = part.layout.filled(torch.device("cpu"))
        filled = torch.ones_like(found, dtype=torch.bool) if filled is None else filled
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert close(found[filled], expected[filled])


@every_method
@pytest.mark.parametrize("mass", [False, True], ids=["", "mass"])
@pytest.mark.parametrize(("mix", "padded"), crossed(list(MIXES), [False, True]))
def test_blocks_of_queries_meet_without_a_seam(
    kind: type[Attention], mix: str, padded: bool, mass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks so small that every form walks a chunk in several of them."""
    monkeypatch.setattr(kvtailor.ops.attention.prompt, "_BLOCK", 1 << 13)
    made, out, _, received = defined(SIZES[0], mix, 70, padded=padded, seed=14)
    want = mass and kind.gives_mass
    got = sample_of(kind).attend(
        request_of(
            made.query,
            made.parts,
            made.visible,
            0.04,
            want_mass=want,
            real_queries=made.real_queries,
            context=STILL,
        )
    )
    assert close(got.output, out)
    for part, found, expected in zip(made.parts, got.mass or [], received, strict=want):
        filled = part.layout.filled(torch.device("cpu"))
        everything = torch.ones_like(found, dtype=torch.bool) if filled is None else filled
        assert close(found[everything], expected[everything])


def test_each_block_adds_the_mass_of_its_own_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where rows begin at different columns, so that queries of a block count in some rows alone."""
    test_blocks_of_queries_meet_without_a_seam(Rolling, "dense", True, True, monkeypatch)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mix", ["prompt", "tail", "ragged", "all"])
@pytest.mark.parametrize("new", [1, 3, 64])
def test_sixteen_bits(kind: type[Attention], dtype: torch.dtype, mix: str, new: int) -> None:
    made, out, *_ = defined(SIZES[0], mix, new, 0.1, dtype=dtype, padded=True, seed=11)
    request = request_of(made.query, made.parts, made.visible, 0.1, context=STILL)
    got = sample_of(kind).attend(request)
    # What decodes rounds to 16 bits, as `naive` does; codes that are read as they are stored are rounded once, at last.
    exact = dataclasses.replace(made, query=made.query.float(), parts=[in_float32(part) for part in made.parts])
    near = 3e-2 if dtype == torch.bfloat16 else 1e-2
    assert got.output.dtype == dtype
    assert close(got.output, out, near) or close(got.output, naive(exact, 0.1)[0], near)
    with dispatch.using("reference"):
        decoded = sample_of(kind).attend(request)
    assert decoded.output.dtype == dtype and close(decoded.output, out, near)


def in_float32(part: Any) -> Any:
    """The same part, whose states and scales are float32, so that what is decoded is not rounded."""
    if isinstance(part, torch.Tensor):
        return part.float() if part.is_floating_point() else part
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    named = {field.name: in_float32(getattr(part, field.name)) for field in dataclasses.fields(part) if field.init}
    return dataclasses.replace(part, **named)


@every_method
@pytest.mark.parametrize("pair", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("new", [1, 3, 64])
def test_autocast_queries(kind: type[Attention], pair: tuple[torch.dtype, torch.dtype], new: int) -> None:
    """Under autocast the cache may be wider or narrower than the query; the output is the query's."""
    made = case(SIZES[0], "dense", new, dtype=pair[1], seed=12)
    made.query = made.query.to(pair[0])
    got = sample_of(kind).attend(request_of(made.query, made.parts, made.visible, 0.1, context=STILL))
    assert got.output.dtype == pair[0]
    assert close(got.output, naive(made, 0.1)[0], 3e-2)


@pytest.mark.parametrize("kind", [k for k in METHODS if k.graph_safe], ids=lambda kind: kind.__name__)
@every_mix
def test_what_repeats_reads_how_far_the_tail_is_filled(kind: type[Attention], mix: str) -> None:
    """One more token in the free slots of the same parts, of which only the counter has changed."""
    made = case(SIZES[0], mix, 2, seed=3)
    *parts, tail = made.parts
    layout, size = tail.layout, tail.layout.size
    positions = layout.positions
    if positions is not None:
        positions = torch.cat([positions, positions[:, -1:] + torch.arange(1, 8, dtype=torch.int32)], 1)
    lengths = torch.full((layout.lanes,), size - 1, dtype=torch.int32)
    buffers = [torch.cat([side, torch.zeros_like(side[:, :7])], 1) for side in tail.decode()]
    layout = dataclasses.replace(layout, size=size + 7, positions=positions, lengths=lengths)
    held = [*parts, PlainSegment(layout=layout, keys=buffers[0], values=buffers[1])]
    expected = naive(made, 0.04)[0]
    visible = dataclasses.replace(made.visible, new_tokens=1, first_column=made.seen - 1)
    method = sample_of(kind)
    for token in range(2):
        query = made.query[:, :, token : token + 1]
        got = method.attend(request_of(query, held, visible, 0.04, context=STILL))
        assert close(got.output, expected[:, :, token : token + 1]), token
        lengths.add_(1)


@every_method
def test_inputs_are_not_changed_and_rows_do_not_meet(kind: type[Attention]) -> None:
    made = case(SIZES[0], "all", 3, padded=True, seed=13)
    before = made.query.clone(), [t.clone() for part in made.parts for t in part.tensors().values()]
    whole = sample_of(kind).attend(request_of(made.query, made.parts, made.visible, 0.04, context=STILL)).output
    assert torch.equal(made.query, before[0])
    after = [t for part in made.parts for t in part.tensors().values()]
    assert all(torch.equal(a.nan_to_num(5), b.nan_to_num(5)) for a, b in zip(after, before[1], strict=True))
    assert made.visible.real is not None
    for row in range(3):
        one = [part.rows(torch.tensor([row])) for part in made.parts]
        visible = dataclasses.replace(made.visible, real=made.visible.real[row : row + 1])
        alone = sample_of(kind).attend(request_of(made.query[row : row + 1], one, visible, 0.04, context=STILL)).output
        assert torch.allclose(alone, whole[row : row + 1], atol=1e-5)
