"""Segments that attention reads otherwise than decoded: values to be lifted, lanes that share them, merged tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.contract.test_attend import METHODS
from tests.support.attention_cases import MIXES, SIZES, STILL, Case, case, close, request_of
from tests.support.discover import sample_of
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.attend.contract import Attention
from kvtailor.attend.segments import Segments
from kvtailor.encode.contract import Codec
from kvtailor.encode.hadamard import HadamardSegment
from kvtailor.encode.plain import Plain
from kvtailor.errors import PlanError
from kvtailor.ops.codes.hadamard import mixed, unmixed
from kvtailor.ops.segments.around import Weighted
from kvtailor.plan import Plan
from kvtailor.types import Layout, Lift, Segment, SegmentView

CPU = torch.device("cpu")
WEIGHING = [kind for kind in METHODS if kind.weighs_tokens]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handmade(Segment):
    """A reading as it is given; it decodes token by token."""

    layout: Layout
    read: SegmentView
    codec = "handmade"

    def view(self) -> SegmentView:
        return self.read

    def decode(self) -> tuple[Tensor, Tensor]:
        read = self.read
        lanes, slots = read.keys.shape[:2]
        source = {lane: lane for lane in range(lanes)}
        if read.shared is not None:
            source = {lane: i for i, each in enumerate(read.shared.tolist()) for lane in each}
        out = torch.zeros((lanes, slots, read.width), dtype=torch.float64)
        for lane, owner in enumerate(self.layout.owners(CPU).tolist()):
            for slot in range(slots):
                value = read.values[source[lane], slot].double()
                if read.lift is not None:
                    value = value @ read.lift.matrix[owner % self.layout.heads].double()
                    if read.lift.offset is not None:
                        value = value + read.lift.offset[owner % self.layout.heads].double()
                out[lane, slot] = value
        return read.keys, out.to(read.keys.dtype)

    def rows(self, index: Tensor) -> Segment:
        raise NotImplementedError

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Segment:
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def closed_form_bytes(self) -> int:
        return 0

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        return {}, {}


def otherwise(made: Case, *, lifted: bool, weighted: bool, shared: bool = False, offset: bool = True) -> list[Tensor]:
    """Makes every part before the tail read otherwise; how many tokens each slot of each part stands for."""
    _, h, _, _, dv = made.sizes
    counts = [torch.ones((part.layout.lanes, part.layout.size), dtype=torch.int64) for part in made.parts]
    for i, part in enumerate(made.parts[:-1]):
        read, seed = part.view(), 200 + i
        if lifted:
            groups = read.keys.shape[0] if not shared else read.keys.shape[0] // h
            read = dataclasses.replace(
                read,
                values=states((groups, part.layout.size, 9), seed, read.keys.dtype),
                lift=Lift(
                    matrix=states((h, 9, dv), seed + 40) / 3, offset=states((h, dv), seed + 50) if offset else None
                ),
                shared=torch.arange(groups * h).view(groups, h) if shared else None,
            )
        if weighted:
            counts[i] = torch.randint(1, 5, counts[i].shape, generator=torch.Generator().manual_seed(seed))
            read = dataclasses.replace(read, log_weight=counts[i].float().log())
        made.parts[i] = Handmade(layout=part.layout, read=read)
    return counts


def repeated(made: Case, counts: list[Tensor], scaling: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Every token as often as it counts, in one softmax, head by head in float64: out, lse, mass of each slot."""
    b, h, g, _, dv = made.sizes
    out = torch.zeros((b, h * g, made.new, dv), dtype=torch.float64)
    lse = torch.full((b, h * g, made.new), -torch.inf, dtype=torch.float64)
    mass = [torch.zeros(count.shape, dtype=torch.float64) for count in counts]
    decoded = [part.decode() for part in made.parts]
    real = torch.ones((b, made.new), dtype=torch.bool) if made.real_queries is None else made.real_queries
    for row in range(b):
        for head in range(h):
            tokens = []
            for i, part in enumerate(made.parts):
                columns = part.layout.columns(CPU).expand(counts[i].shape)
                filled = part.layout.filled(CPU)
                for lane in (part.layout.owners(CPU) == row * h + head).nonzero()[:, 0].tolist():
                    for slot in range(part.layout.size):
                        if filled is None or filled[lane, slot]:
                            tokens += [(i, lane, slot, int(columns[lane, slot]))] * int(counts[i][lane, slot])
            keys = torch.stack([decoded[i][0][lane, slot] for i, lane, slot, _ in tokens]).double()
            values = torch.stack([decoded[i][1][lane, slot] for i, lane, slot, _ in tokens]).double()
            columns = torch.tensor([[column for *_, column in tokens]])
            seen = made.visible.at(torch.tensor([row]), columns)[0].expand(made.new, -1)
            heads = slice(head * g, head * g + g)
            logits = (made.query[row, heads].double() @ keys.T * scaling).masked_fill(~seen, -torch.inf)
            weights = logits.softmax(-1).nan_to_num(0.0)
            out[row, heads], lse[row, heads] = weights @ values, logits.logsumexp(-1)
            for share, (i, lane, slot, _) in zip(weights[:, real[row]].sum((0, 1)), tokens, strict=True):
                mass[i][lane, slot] += share
    return out, lse, mass


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(
    ("mix", "new", "padded"),
    [("dense", 1, False), ("all", 1, True), ("ragged", 5, True), ("dense", 70, False)],
    ids=str,
)
def test_equals_every_token_decoded(kind: type[Attention], mix: str, weighted: bool, new: int, padded: bool) -> None:
    if kind.needs_codec is not None or (weighted and kind not in WEIGHING):
        return
    made = case(SIZES[2], mix, new, padded=padded, seed=3)
    counts = otherwise(made, lifted=True, weighted=weighted)
    expected, sums, mass = repeated(made, counts, 0.04)
    want = kind.gives_mass
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
    assert close(got.output, expected)
    assert got.lse is None or close(got.lse, sums)
    for part, found, each in zip(made.parts, got.mass or [], mass, strict=want):
        filled = part.layout.filled(CPU)
        assert close(*(x if filled is None else x[filled] for x in (found, each)))


def test_the_first_of_two_tokens_does_not_see_the_second() -> None:
    made = case(SIZES[0], "dense", 2, seed=15)
    counts = otherwise(made, lifted=False, weighted=False)
    got = Segments().attend(request_of(made.query, made.parts, made.visible, 0.04))
    assert close(got.output, repeated(made, counts, 0.04)[0])


@pytest.mark.parametrize("kind", WEIGHING, ids=lambda kind: kind.__name__)
def test_a_token_that_counts_twice_is_the_token_twice(kind: type[Attention]) -> None:
    made = case(SIZES[0], "dense", 1, seed=4)
    counts = otherwise(made, lifted=False, weighted=True)
    got = sample_of(kind).attend(request_of(made.query, made.parts, made.visible, 0.04))
    assert close(got.output, repeated(made, counts, 0.04)[0])
    once = [torch.ones_like(count) for count in counts]
    assert not close(got.output, repeated(made, once, 0.04)[0])


@pytest.mark.parametrize("mass", [False, True], ids=["", "mass"])
@pytest.mark.parametrize(("mix", "new", "padded"), [("all", 1, True), ("kivi", 1, False), ("all", 5, False)], ids=str)
def test_tokens_in_codes_count_as_often_as_they_stand_for(mix: str, new: int, padded: bool, mass: bool) -> None:
    made = case(SIZES[0], mix, new, padded=padded, seed=8)
    counts = [torch.ones((part.layout.lanes, part.layout.size), dtype=torch.int64) for part in made.parts]
    for i, part in enumerate(made.parts[:-1]):
        counts[i] = torch.randint(1, 5, counts[i].shape, generator=torch.Generator().manual_seed(i))
        made.parts[i] = Weighted(layout=part.layout, inner=part, log_weight=counts[i].float().log())
    expected, sums, masses = repeated(made, counts, 0.04)
    got = Segments().attend(
        request_of(made.query, made.parts, made.visible, 0.04, want_mass=mass, real_queries=made.real_queries)
    )
    assert got.lse is not None and close(got.output, expected, 1e-4) and close(got.lse, sums, 1e-4)
    for part, found, each in zip(made.parts, got.mass or [], masses, strict=mass):
        filled = part.layout.filled(CPU)
        assert close(*(x if filled is None else x[filled] for x in (found, each)), 1e-4)


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("offset", [False, True], ids=["", "offset"])
def test_heads_may_share_their_values(kind: type[Attention], offset: bool) -> None:
    if kind.needs_codec is not None:
        return
    made = case(SIZES[0], "dense", 3, seed=5)
    counts = otherwise(made, lifted=True, weighted=False, shared=True, offset=offset)
    got = sample_of(kind).attend(request_of(made.query, made.parts, made.visible, 0.04, context=STILL))
    assert close(got.output, repeated(made, counts, 0.04)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("new", [1, 3])
def test_sixteen_bits(dtype: torch.dtype, new: int) -> None:
    """In bfloat16 the plain parts go through the fused kernel, and are merged with the others."""
    made = case(SIZES[0], "all", new, dtype=dtype, seed=6)
    plain = made.parts[0]
    counts = otherwise(made, lifted=True, weighted=True)
    made.parts[0], counts[0] = plain, torch.ones_like(counts[0])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 5e-3
    got = sample_of(METHODS[-1]).attend(request_of(made.query, made.parts, made.visible, 0.1))
    assert got.lse is not None and close(got.output, repeated(made, counts, 0.1)[0], tolerance)


def test_a_lift_goes_through_a_segment_around_it() -> None:
    made = case(SIZES[0], "dense", 1, seed=7)
    otherwise(made, lifted=True, weighted=True)
    inner = made.parts[0]
    around = HadamardSegment(layout=inner.layout, inner=inner, only="both")
    keys, values = around.decode()
    assert close(keys, unmixed(inner.decode()[0]).double()) and close(mixed(values), inner.decode()[1].double())
    read = around.view()
    assert read.log_weight is not None and read.values is inner.view().values
    assert close(Handmade(layout=inner.layout, read=read).decode()[1], values.double(), 1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merging(Plain):
    """Says that its slots may stand for several tokens."""

    @property
    def weighs_tokens(self) -> bool:
        return True


def test_an_attention_that_counts_slots_as_one_is_refused() -> None:
    codec: Codec = Merging()
    assert Plan(encode=codec).encode is codec
    for kind in METHODS:
        if kind in WEIGHING or kind.needs_codec is not None:
            continue
        with pytest.raises(PlanError, match="stand for several tokens, which .* would count as one"):
            Plan(encode=codec, attend=sample_of(kind))


def test_mixes_are_there() -> None:
    assert {"dense", "ragged", "all"} <= set(MIXES) and len(WEIGHING) >= 2 and METHODS[-1].__name__ == "Segments"
