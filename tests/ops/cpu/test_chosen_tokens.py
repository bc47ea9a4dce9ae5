"""Tokens and pages that promise most, chosen and read where they lie, on every variant against plain forms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from tests.ops.cpu.coded_layouts import every_variant, needs_built
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.ops.attention.cpu import choose
from kvtailor.ops.attention.cpu.choose import Candidates, attend_best_pages, attend_chosen, unsuited_states
from kvtailor.ops.attention.lanes import Lanes
from kvtailor.ops.attention.parts import read_lanes
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.lanes.chunks import chunk_bounds, promised
from kvtailor.ops.lanes.rows import chosen_places, gather, rows_of
from kvtailor.ops.lanes.topk import keep_top
from kvtailor.types import Layout, PlainSegment, Softmax

pytestmark = needs_built


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows, kv heads, queries of each, sizes of a key and a value; slots of each part; what is chosen from, and how."""

    shape: tuple[int, int, int, int, int]
    slots: tuple[int, ...]
    covered: int
    span: int
    channels: int
    budget: int
    dtype: torch.dtype = torch.float32
    cap: float | None = None
    sinks: bool = False
    # So many slots, of the first `after`, compete; None: all.
    listed: int | None = None
    after: int = 0


CASES = {
    "two parts": Case(shape=(1, 2, 4, 64, 32), slots=(200, 33), covered=150, span=3, channels=20, budget=40),
    "odd heads, one query": Case(
        shape=(2, 3, 1, 32, 64), slots=(63, 1), covered=60, span=4, channels=32, budget=10, dtype=torch.bfloat16
    ),
    "a last chunk of one": Case(
        shape=(1, 1, 7, 64, 64), slots=(1, 700), covered=691, span=2, channels=1, budget=300, dtype=torch.float16
    ),
    "no chunks": Case(shape=(1, 2, 2, 128, 128), slots=(90, 10), covered=0, span=1, channels=61, budget=30),
    "more chunks than are looked at together": Case(
        shape=(1, 1, 3, 32, 32), slots=(2300,), covered=2299, span=2, channels=5, budget=7
    ),
    "a cap and sinks": Case(
        shape=(3, 2, 4, 64, 64), slots=(300, 20), covered=300, span=5, channels=30, budget=33, cap=5.0, sinks=True
    ),
    "chosen before": Case(
        shape=(1, 2, 4, 32, 32), slots=(100, 40), covered=40, span=3, channels=9, budget=21, listed=37, after=120
    ),
    "all but one": Case(shape=(1, 2, 4, 32, 32), slots=(50,), covered=50, span=3, channels=9, budget=49),
}


def states_of(made: Case, generator: torch.Generator) -> list[PlainSegment]:
    """Parts whose lanes lie further apart than their slots."""
    (b, h, _, d, dv), parts, start = made.shape, [], 0
    for size in made.slots:
        keys, values = (torch.randn(b * h, size + 3, each, generator=generator).to(made.dtype) for each in (d, dv))
        layout = Layout(rows=b, heads=h, size=size, start=start)
        parts.append(PlainSegment(layout=layout, keys=keys[:, 1 : size + 1], values=values[:, 2 : size + 2]))
        start += size
    return parts


@every_variant
@pytest.mark.parametrize("name", CASES)
def test_the_best_are_chosen_and_read(library: Library, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, generator = CASES[name], torch.Generator().manual_seed(len(name))
    b, h, g, d, _ = made.shape
    parts = states_of(made, generator)
    query = (3 * torch.randn(b * h, g, 1, d, generator=generator)).to(made.dtype)
    sinks = torch.randn(b * h, g, 1, generator=generator) if made.sinks else None
    keys, values = [part.keys for part in parts], [part.values for part in parts]
    rows, listed = rows_of(parts, None, torch.device("cpu")), None
    if made.listed is not None:
        picked = [torch.randperm(made.after - 1, generator=generator)[: made.listed - 1] for _ in range(b * h)]
        listed = torch.stack([torch.cat([each, torch.tensor([made.after - 1])]).sort().values for each in picked])
        at = torch.cat([listed, torch.arange(made.after, sum(made.slots)).expand(b * h, -1)], 1)
        rows = rows.pick(at, torch.ones_like(at, dtype=torch.bool), torch.full(at.shape[:1], at.shape[1]))
    tokens, span = rows.columns.shape[1], torch.full((b * h,), made.span)
    covered = torch.full((b * h,), made.covered)
    old = replace(
        rows, columns=rows.columns[:, : made.covered], address=rows.address[:, : made.covered], counts=covered
    )
    bounds = chunk_bounds(keys, replace(old, on_host=covered), span) if made.covered else None
    soft = Softmax(softcap=made.cap)
    expected = promised(
        query[:, :, 0],
        partial(gather, keys),
        rows,
        0.2,
        bounds=bounds,
        size=span,
        covered=covered,
        channels=torch.full((b * h,), made.channels),
        softmax=soft,
        sinks=sinks,
        loose=tokens - made.covered,
    )
    states = list(zip(keys, values, strict=True))
    assert unsuited_states(states, bounds) is None
    candidates = Candidates(
        listed=None if listed is None else listed.to(torch.int32),
        after=made.after,
        tokens=tokens,
        bounds=bounds,
        span=span.tolist(),
        channels=[made.channels] * b * h,
        covered=covered.tolist(),
    )
    empty = torch.empty
    monkeypatch.setattr(
        choose.torch,
        "empty",
        lambda *shape, dtype: empty(*shape, dtype=dtype).fill_(torch.nan if dtype.is_floating_point else 0),
    )
    out, lse, scores = attend_chosen(
        query, states, candidates, budget=made.budget, scaling=0.2, softcap=made.cap, sinks=sinks, using=library
    )
    monkeypatch.undo()
    place = torch.arange(tokens)
    chunks = 0 if bounds is None else bounds.shape[2]
    mine = scores[:, torch.where(place < made.covered, place // made.span, chunks + place - made.covered)]
    assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-7)
    # From its own scores exactly those are read that torch chooses.
    kept = keep_top(mine.view(b, h, tokens), torch.full((b, h), made.budget)).flatten(0, 1)
    address = rows.address.gather(1, chosen_places(kept)[0])
    assert address.shape[1] == made.budget
    lanes = Lanes(keys=gather(keys, address).float(), values=gather(values, address).float())
    read = read_lanes(query.view(b, h * g, 1, d).float(), h, [lanes], 0.2, softmax=soft)
    assert torch.allclose(out.reshape(read.output.shape), read.output, rtol=1e-4, atol=1e-5)
    assert read.lse is not None and torch.allclose(lse.reshape(read.lse.shape), read.lse, rtol=1e-4, atol=1e-5)


@every_variant
def test_equal_scores_go_to_the_earliest_and_what_is_no_number_is_said(library: Library) -> None:
    keys, values = torch.ones(1, 40, 32), torch.arange(40.0)[None, :, None].expand(1, 40, 32).contiguous()
    query = torch.ones(1, 2, 1, 32)
    candidates = Candidates(listed=None, after=0, tokens=40, bounds=None, span=[0], channels=[32], covered=[0])

    def read(query: Tensor) -> Tensor:
        return attend_chosen(query, [(keys, values)], candidates, budget=7, scaling=1.0, using=library)[0]

    assert torch.allclose(read(query), torch.tensor(3.0))
    query[0, 1, 0, 3] = torch.nan
    with pytest.raises(CacheMisuse, match="hold NaN"):
        read(query)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "most, slots, broken",
    [(3, (63, 12, 5), False), (40, (63, 12, 5), False), (9, (4500, 1), False), (3, (63, 12, 5), True)],
)
def test_the_best_pages_are_read_and_all_that_has_none(
    library: Library, dtype: torch.dtype, most: int, slots: tuple[int, ...], broken: bool
) -> None:
    """Pages of 4, of which the last of a part has fewer; the part in the end has none."""
    made = Case(shape=(2, 2, 3, 32, 64), slots=slots, covered=0, span=1, channels=1, budget=1, dtype=dtype)
    generator, page = torch.Generator().manual_seed(most), 4
    parts = states_of(made, generator)
    states = [(part.keys, part.values) for part in parts]
    query = (2 * torch.randn(4, 3, 1, 32, generator=generator)).to(dtype)
    bounds: list[tuple[Tensor, Tensor] | None] = [None] * len(parts)
    for i, part in enumerate(parts[:-1]):
        pieces = part.keys.split(page, 1)
        low, high = (torch.stack([of(each, 1) for each in pieces], 1) for of in (torch.amin, torch.amax))
        bounds[i] = low, high
    if broken:
        query[0, 0, 0, 0] = torch.nan
    found = attend_best_pages(query, states, bounds, page=page, most=most, scaling=0.2, using=library)
    asked = query[:, :, 0].float()
    for owner in range(4):
        promises, members, kept = [], [], []
        for i, both in enumerate(bounds):
            if both is None:
                kept += [(i, slot) for slot in range(slots[i])]
                continue
            for p in range(both[0].shape[1]):
                low, high = (side[owner, p].float() for side in both)
                each = asked[owner].clamp(min=0) @ high + asked[owner].clamp(max=0) @ low
                promises.append(torch.inf if bool(each.isnan().any()) else float(each.max()))
                members.append([(i, slot) for slot in range(page * p, min(page * p + page, slots[i]))])
        order = sorted(range(len(promises)), key=lambda p: -promises[p])[:most]
        # A page that is chosen by no finite number is not read.
        kept += [each for p in order if math.isfinite(promises[p]) for each in members[p]]
        assert int(found[2][owner]) == len(kept)
        keys, values = (torch.stack([states[i][side][owner, slot].float() for i, slot in kept]) for side in (0, 1))
        logits = 0.2 * asked[owner] @ keys.T
        expected = logits.softmax(-1) @ values
        assert torch.allclose(found[0][owner, :, 0], expected, rtol=1e-3, atol=1e-4, equal_nan=True)
        expected = logits.logsumexp(-1)
        assert torch.allclose(found[1][owner, :, 0], expected, rtol=1e-4, atol=1e-4, equal_nan=True)
