"""What the room `attend` promises, asked of every method in its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from tests.discover import methods_of, sample_of
from tests.segments_of import Padded, states, uneven
from torch import Tensor

import kvtailor.attend
import kvtailor.ops.prompt
from kvtailor.attend.contract import Attention, LayerFacts
from kvtailor.encode.indexed import Indexed
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.plain import Plain
from kvtailor.types import Layout, PlainSegment, Rotation, Segment

METHODS = methods_of(kvtailor.attend, Attention)
every_method = pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
with_mass = pytest.mark.parametrize("kind", [k for k in METHODS if k.gives_mass], ids=lambda kind: kind.__name__)
# b, h, g, d, dv: odd heads, one head, unequal sizes.
SIZES = [(3, 5, 2, 24, 24), (1, 1, 1, 16, 16), (2, 3, 3, 20, 12)]
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
# What is held before the tail, and how many of its tokens the tail holds beside the new ones.
MIXES: dict[str, tuple[str, ...]] = {
    "prompt": (),
    "tail": ("tail",),
    "moved tail": ("positions",),
    "dense": ("dense", "tail"),
    "ragged": ("ragged", "tail"),
    "kivi": ("kivi", "kivi", "tail"),
    "all": ("ragged", "dense", "kivi", "ragged kivi", "indexed", "tail"),
}
every_mix = pytest.mark.parametrize("mix", MIXES)
# A method that turns keys gives what the others give where a turn changes nothing; its own test has turns that do.
STILL = LayerFacts(layer=4, layers=6, rotation=Rotation(frequencies=torch.zeros(6)))


@dataclasses.dataclass
class Case:
    """Parts in time order, and the definition's inputs: all that each row and head holds."""

    parts: list[Segment]
    new: int
    seen: int
    query: Tensor
    visible: Padded
    sizes: tuple[int, int, int, int, int]

    @property
    def real_queries(self) -> Tensor | None:
        return None if self.visible.real is None else self.visible.real[:, self.seen - self.new : self.seen]


def case(
    size: tuple[int, int, int, int, int],
    mix: str,
    new: int,
    *,
    seed: int = 0,
    padded: bool = False,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:
    b, h, g, d, dv = size
    column, parts = 0, []
    span = 67
    for i, what in enumerate(MIXES[mix]):
        keys, values = states((b * h, span, d), seed + i, dtype), states((b * h, span, dv), seed + 50 + i, dtype)
        layout = Layout(rows=b, heads=h, size=span, start=column)
        if what in ("ragged", "ragged kivi"):
            layout, owner, at = uneven(b, h, 32, most=span, columns=span, seed=seed + i)
            assert layout.positions is not None
            layout = dataclasses.replace(layout, positions=layout.positions + column)
            keys, values = keys[owner, at], values[owner, at]
        elif what == "positions":
            # Each row and head kept other columns.
            draws = [torch.randperm(span, generator=torch.Generator().manual_seed(n))[:30] for n in range(b * h)]
            at = torch.stack(draws).sort(-1).values
            keys, values = (x.gather(1, at[..., None].expand(-1, -1, x.shape[-1])) for x in (keys, values))
            columns = (at + column).to(torch.int32)
            layout = Layout(rows=b, heads=h, size=30, positions=columns)
        if what not in ("tail", "positions"):
            codec = Kivi(bits=4) if "kivi" in what else Indexed() if what == "indexed" else Plain()
            parts.append(codec.encode(layout, keys, values))
        else:
            parts.append(PlainSegment(layout=layout, keys=keys, values=values))
        column += span
    keys, values = states((b * h, new, d), seed + 90, dtype), states((b * h, new, dv), seed + 91, dtype)
    before = parts.pop() if MIXES[mix] else None
    layout = Layout(rows=b, heads=h, size=new, start=column)
    if before is not None:
        if before.layout.start is not None:
            layout = Layout(rows=b, heads=h, size=before.layout.size + new, start=before.layout.start)
        else:
            newest = torch.arange(column, column + new, dtype=torch.int32).expand(b * h, -1)
            positions = torch.cat([before.layout.columns(torch.device("cpu")).to(torch.int32), newest], 1)
            layout = Layout(rows=b, heads=h, size=positions.shape[1], positions=positions)
        old = before.decode()
        keys, values = torch.cat([old[0], keys], 1), torch.cat([old[1], values], 1)
    # As in a real tail, the lanes are cut from a buffer with room for more, and that room is poisoned.
    room = [torch.full((x.shape[0], x.shape[1] + 9, x.shape[2]), float("nan"), dtype=dtype) for x in (keys, values)]
    for buffer, x in zip(room, (keys, values), strict=True):
        buffer[:, : x.shape[1]] = x
    parts.append(PlainSegment(layout=layout, keys=room[0][:, : layout.size], values=room[1][:, : layout.size]))
    seen = column + new
    real = None
    if padded:
        # The last row is padding but for its newest tokens: some of its queries see nothing.
        left = torch.tensor([0, 5, seen - max(1, new - 2)])[:b]
        real = torch.arange(seen)[None] >= left[:, None]
    visible = Padded(new_tokens=new, first_column=column, real=real, window=window)
    query = states((b, h * g, new, d), seed + 99, dtype)
    return Case(parts=parts, new=new, seen=seen, query=query, visible=visible, sizes=size)


def naive(case: Case, scaling: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention by its definition in float64, head by head: out, lse, mass of each part."""
    b, h, g, _, dv = case.sizes
    out = torch.zeros((b, h * g, case.new, dv), dtype=torch.float64)
    lse = torch.full((b, h * g, case.new), -torch.inf, dtype=torch.float64)
    decoded = [part.decode() for part in case.parts]
    mass = [torch.zeros(keys.shape[:2], dtype=torch.float64) for keys, _ in decoded]
    real = torch.ones((b, case.new), dtype=torch.bool) if case.real_queries is None else case.real_queries
    cpu = torch.device("cpu")
    for row in range(b):
        for head in range(h):
            mine = [
                (part.layout.owners(cpu) == row * h + head)[:, None].expand(part.layout.lanes, part.layout.size)
                & (True if part.layout.filled(cpu) is None else part.layout.filled(cpu))
                for part in case.parts
            ]
            keys = torch.cat([k[m] for (k, _), m in zip(decoded, mine, strict=True)]).double()
            values = torch.cat([v[m] for (_, v), m in zip(decoded, mine, strict=True)]).double()
            columns = torch.cat(
                [part.layout.columns(cpu).expand(m.shape)[m] for part, m in zip(case.parts, mine, strict=True)]
            )
            seen = case.visible.at(torch.tensor([row]), columns[None])[0].expand(case.new, -1)
            heads = slice(head * g, head * g + g)
            logits = (case.query[row, heads].double() @ keys.T * scaling).masked_fill(~seen, -torch.inf)
            weights = logits.softmax(-1).nan_to_num(0.0)
            out[row, heads] = weights @ values
            lse[row, heads] = logits.logsumexp(-1)
            shares = weights[:, real[row]].sum((0, 1)).split([int(m.sum()) for m in mine])
            for total, m, share in zip(mass, mine, shares, strict=True):
                total[m] = share
    return out, lse, mass


def readable(kind: type[Attention], parts: Sequence[Segment]) -> bool:
    return kind.needs_codec is None or kind.needs_codec in {part.codec for part in parts}


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    blind = expected == -torch.inf
    same = bool((found[blind] == -torch.inf).all())
    return same and torch.allclose(found[~blind].double(), expected[~blind], atol=tolerance, rtol=tolerance)


def test_the_folder_holds_methods() -> None:
    assert {"Quest", "Reference", "Rocket", "Rolling", "Segments"} <= {kind.__name__ for kind in METHODS}


@every_method
def test_is_a_frozen_keyword_only_dataclass_with_defaults(kind: type[Attention]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert sample_of(kind) == sample_of(kind) and hash(sample_of(kind)) == hash(sample_of(kind))


@every_method
@every_size
@every_mix
@pytest.mark.parametrize("new", [1, 3, 17, 130])
def test_equals_the_definition(kind: type[Attention], size: tuple[int, ...], mix: str, new: int) -> None:
    """Budgets of the defaults cover what is held here, so every method reads everything."""
    made = case(size, mix, new)  # type: ignore[arg-type]
    got = sample_of(kind).attend(made.query, made.parts, made.visible, 0.04, facts=STILL)
    out, lse, _ = naive(made, 0.04)
    assert got.output.shape == out.shape and got.output.dtype == made.query.dtype
    assert close(got.output, out)
    if got.lse is not None:
        assert close(got.lse, lse)
    # What says of itself that several tokens are read as each would be alone never chooses.
    assert got.read is None or not kind.reads_alike


@every_method
@every_mix
@pytest.mark.parametrize("new", [1, 3, 17, 130])
def test_left_padding_is_exact_and_a_blind_query_gives_zeros(kind: type[Attention], mix: str, new: int) -> None:
    made = case(SIZES[0], mix, new, padded=True, seed=7)
    got = sample_of(kind).attend(made.query, made.parts, made.visible, 0.04, facts=STILL)
    out, lse, _ = naive(made, 0.04)
    assert bool(got.output.isfinite().all()) and close(got.output, out)
    blind = lse == -torch.inf
    assert bool((got.output[blind] == 0).all())
    if got.lse is not None:
        assert close(got.lse, lse)


@every_method
@pytest.mark.parametrize("mix", ["prompt", "tail", "all"])
@pytest.mark.parametrize("new", [1, 17, 64])
def test_a_window_hides_what_is_older(kind: type[Attention], mix: str, new: int) -> None:
    made = case(SIZES[0], mix, new, window=30, seed=8)
    got = sample_of(kind).attend(made.query, made.parts, made.visible, 0.04, facts=STILL)
    assert close(got.output, naive(made, 0.04)[0])


@with_mass
@every_mix
@pytest.mark.parametrize("new", [1, 3, 17, 130])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_mass_is_the_sum_of_the_probabilities(kind: type[Attention], mix: str, new: int, padded: bool) -> None:
    made = case(SIZES[0], mix, new, padded=padded, seed=9)
    got = sample_of(kind).attend(
        made.query, made.parts, made.visible, 0.04, want_mass=True, real_queries=made.real_queries, facts=STILL
    )
    out, _, mass = naive(made, 0.04)
    assert close(got.output, out)
    assert got.mass is not None and len(got.mass) == len(mass)
    for part, found, expected in zip(made.parts, got.mass, mass, strict=True):
        filled = part.layout.filled(torch.device("cpu"))
        filled = torch.ones_like(found, dtype=torch.bool) if filled is None else filled
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert close(found[filled], expected[filled])


@every_method
@every_mix
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("mass", [False, True], ids=["", "mass"])
def test_blocks_of_queries_meet_without_a_seam(
    kind: type[Attention], mix: str, padded: bool, mass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks so small that every form walks a chunk in several of them."""
    monkeypatch.setattr(kvtailor.ops.prompt, "_BLOCK", 1 << 13)
    made = case(SIZES[0], mix, 70, padded=padded, seed=14)
    want = mass and kind.gives_mass
    got = sample_of(kind).attend(
        made.query, made.parts, made.visible, 0.04, want_mass=want, real_queries=made.real_queries, facts=STILL
    )
    out, _, received = naive(made, 0.04)
    assert close(got.output, out)
    for part, found, expected in zip(made.parts, got.mass or [], received, strict=want):
        filled = part.layout.filled(torch.device("cpu"))
        everything = torch.ones_like(found, dtype=torch.bool) if filled is None else filled
        assert close(found[everything], expected[everything])


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mix", ["prompt", "tail", "ragged", "all"])
@pytest.mark.parametrize("new", [1, 3, 64])
def test_sixteen_bits(kind: type[Attention], dtype: torch.dtype, mix: str, new: int) -> None:
    made = case(SIZES[0], mix, new, dtype=dtype, padded=True, seed=11)
    got = sample_of(kind).attend(made.query, made.parts, made.visible, 0.1, facts=STILL)
    assert got.output.dtype == dtype
    # `naive` decodes, which rounds to 16 bits; codes that are read as they are stored are rounded once, in the end.
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-2
    assert close(got.output, naive(made, 0.1)[0], tolerance)


@every_method
@pytest.mark.parametrize("pair", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("new", [1, 3, 64])
def test_autocast_queries(kind: type[Attention], pair: tuple[torch.dtype, torch.dtype], new: int) -> None:
    """Under autocast the cache may be wider or narrower than the query; the output is the query's."""
    made = case(SIZES[0], "dense", new, dtype=pair[1], seed=12)
    made.query = made.query.to(pair[0])
    got = sample_of(kind).attend(made.query, made.parts, made.visible, 0.1, facts=STILL)
    assert got.output.dtype == pair[0]
    assert close(got.output, naive(made, 0.1)[0], 3e-2)


@pytest.mark.parametrize("kind", [k for k in METHODS if k.repeats], ids=lambda kind: kind.__name__)
@every_mix
def test_what_repeats_reads_how_far_the_tail_is_filled(kind: type[Attention], mix: str) -> None:
    """One more token in the room of the same parts, of which only the counter has changed."""
    made = case(SIZES[0], mix, 2, seed=3)
    *parts, tail = made.parts
    layout, size = tail.layout, tail.layout.size
    positions = layout.positions
    if positions is not None:
        positions = torch.cat([positions, positions[:, -1:] + torch.arange(1, 8, dtype=torch.int32)], 1)
    lengths = torch.full((layout.lanes,), size - 1, dtype=torch.int32)
    room = [torch.cat([side, torch.zeros_like(side[:, :7])], 1) for side in tail.decode()]
    layout = dataclasses.replace(layout, size=size + 7, positions=positions, lengths=lengths)
    held = [*parts, PlainSegment(layout=layout, keys=room[0], values=room[1])]
    expected = naive(made, 0.04)[0]
    visible = dataclasses.replace(made.visible, new_tokens=1, first_column=made.seen - 1)
    method = sample_of(kind)
    for token in range(2):
        query = made.query[:, :, token : token + 1]
        got = method.attend(query, held, visible, 0.04, facts=STILL)
        assert close(got.output, expected[:, :, token : token + 1]), token
        lengths.add_(1)


@every_method
def test_inputs_are_not_changed_and_rows_do_not_meet(kind: type[Attention]) -> None:
    made = case(SIZES[0], "all", 3, padded=True, seed=13)
    before = made.query.clone(), [t.clone() for part in made.parts for t in part.tensors().values()]
    whole = sample_of(kind).attend(made.query, made.parts, made.visible, 0.04, facts=STILL).output
    assert torch.equal(made.query, before[0])
    after = [t for part in made.parts for t in part.tensors().values()]
    assert all(torch.equal(a.nan_to_num(5), b.nan_to_num(5)) for a, b in zip(after, before[1], strict=True))
    assert made.visible.real is not None
    for row in range(3):
        one = [part.rows(torch.tensor([row])) for part in made.parts]
        visible = dataclasses.replace(made.visible, real=made.visible.real[row : row + 1])
        alone = sample_of(kind).attend(made.query[row : row + 1], one, visible, 0.04, facts=STILL).output
        assert torch.allclose(alone, whole[row : row + 1], atol=1e-5)
