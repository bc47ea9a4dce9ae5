"""Which tokens or pages could matter to a query, and attention over the chosen ones where they lie, in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.ops.attention.cpu.attention import choose_threads, make_call, run
from kvtailor.ops.cpu.library import DTYPES, Call, Choice, Library, Pages, Side
from kvtailor.ops.segments.attention_inputs import AttentionInputs, BestPages
from kvtailor.ops.segments.coded import Coded, Whole

__all__ = [
    "Candidates",
    "attend_best_pages",
    "attend_chosen",
    "pages_of",
    "side_of_rows",
    "unsuited_best_pages",
    "unsuited_states",
    "attend_pages",
    "page_bounds",
    "unsuited_bounds",
    "unsuited_pages",
]


# Of so many channels, or a multiple, the states of a token fill vectors in every variant.
_WHOLE = 32
_REFUSED = "torch_parallel_for refused to run kvtailor's attention kernel"
_REFUSED_BOUNDS = "torch_parallel_for refused to run kvtailor's kernel of page bounds"


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The tokens of each owner (row * h + head) among which is chosen, in time order; each owner has as many.

    Attributes:
        listed: (b * h, k) int32 slots of the first of them, over all parts; None: they are the first slots.
        after: slot of the token behind those that are listed; the others follow it.
        tokens: of each owner.
        bounds: (b * h, 2 * d, c) from `chunk_bounds`; None: no chunks.
        span: tokens of a chunk, of each owner; 0 where none has bounds.
        channels: that are looked at, of each owner.
        covered: tokens of each owner, the oldest, that are in chunks.
    """

    listed: Tensor | None
    after: int
    tokens: int
    bounds: Tensor | None
    span: Sequence[int]
    channels: Sequence[int]
    covered: Sequence[int]


def unsuited_states(states: Sequence[tuple[Tensor, Tensor]], bounds: Tensor | None) -> str | None:
    """Why tokens of parts with these keys and values (m, s, d) cannot be chosen here, a clause; None where they can."""
    dtype = states[0][0].dtype
    every = [each for both in states for each in both]
    if any(each.dtype != dtype or each.device.type != "cpu" or each.stride(2) != 1 for each in every):
        return "parts are not of one type on the CPU"
    if dtype not in DTYPES or any(each.shape[2] % _WHOLE for each in every):
        return f"float32, bfloat16 and float16 are read, of a multiple of {_WHOLE} channels"
    if bounds is not None and (bounds.dtype != dtype or not bounds.is_contiguous()):
        return "bounds are not of the keys' type"
    return None


def unsuited_best_pages(
    states: Sequence[tuple[Tensor, Tensor]], bounds: Sequence[tuple[Tensor, Tensor] | None]
) -> str | None:
    """Why the best pages of such parts cannot be chosen here, a clause; None where they can."""
    dtype = states[0][0].dtype
    if not all(side.is_contiguous() and side.dtype == dtype for each in bounds if each for side in each):
        return "bounds are not dense and of the keys' type"
    return unsuited_states(states, None)


def attend_chosen(
    query: Tensor,
    states: Sequence[tuple[Tensor, Tensor]],
    candidates: Candidates,
    *,
    budget: int,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    using: Library,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over so many of the candidates; see `ops.lanes.chunks.promised` and `ops.lanes.topk.keep_top`.

    Args:
        query: (b * h, g, 1, d) of one new token.
        states: keys (b * h, s, d) and values (b * h, s, dv) of each part, in time order, lane i of owner i; see
            `unsuited_states`.
        candidates: among which is chosen.
        budget: tokens that are read of each owner; no more than there are.
        scaling, softcap: see `attend_coded`.
        sinks: (b * h, g, 1) logits that belong to no token, for the choice; None: none.
        using: the variant.

    Returns:
        out (b * h, g, 1, dv) float32, lse (b * h, g, 1) float32; and (b * h, c + t) float32 what each chunk, and each
        token without bounds, was promised.

    Raises:
        CacheMisuse: what was promised is no number.
    """
    owners, group, _, size = query.shape
    asked = query.reshape(owners, group, size).to(torch.float32).contiguous()
    chunks = 0 if candidates.bounds is None else candidates.bounds.shape[2]
    widest = chunks + candidates.tokens - min(candidates.covered)
    scores = torch.empty((owners, widest), dtype=torch.float32)
    rows = torch.empty((2, owners, budget), dtype=torch.int64)
    key_rows, value_rows = rows[0].data_ptr(), rows[1].data_ptr()
    call = _call_of_rows(asked, states[0], (key_rows, value_rows), budget, scaling, softcap, using)
    tables, listed = _tables(states), candidates.listed
    for name in ("span", "channels", "covered"):
        tables[name] = (ctypes.c_int64 * owners)(*getattr(candidates, name))
    choice = Choice(
        query=call.query,
        bounds=None if candidates.bounds is None else candidates.bounds.data_ptr(),
        **{name: ctypes.addressof(table) for name, table in tables.items()},
        listed=None if listed is None else listed.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        scores=scores.data_ptr(),
        key_rows=key_rows,
        value_rows=value_rows,
        owners=owners,
        rows=group,
        size=size,
        chunks=chunks,
        count_listed=0 if listed is None else listed.shape[1],
        after=candidates.after,
        tokens=candidates.tokens,
        budget=budget,
        widest=widest,
        kind=call.keys.kind,
        threads=call.threads,
        scaling=scaling,
        softcap=softcap or 0.0,
    )
    functions = using.functions
    scratch = torch.empty(functions.kvtailor_choice_scratch(ctypes.byref(choice)), dtype=torch.float32)
    choice.scratch = scratch.data_ptr()
    wrong, out, lse = _run(functions.kvtailor_choose, choice, call, using)
    if wrong:
        raise CacheMisuse(
            f"scores of shape {tuple(scores.shape)} hold NaN, so no order exists; look for NaN in keys, queries or mass"
        )
    return out, lse, scores


def attend_best_pages(
    query: Tensor,
    states: Sequence[tuple[Tensor, Tensor]],
    bounds: Sequence[tuple[Tensor, Tensor] | None],
    *,
    page: int,
    most: int,
    scaling: float,
    softcap: float | None = None,
    using: Library,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the pages with the highest bounds, and over all of the parts that have no pages.

    Args:
        query: (b * h, g, 1, d) of one new token.
        states: keys (b * h, s, d) and values (b * h, s, dv) of each part, in time order, lane i of owner i; see
            `unsuited_states`.
        bounds: of each part the least and the greatest of each key channel over a page, (b * h, p, d), dense and of the
            keys' dtype; None for a part without pages.
        page: slots of a page; the last of a lane may have fewer.
        most: pages that are read of each owner, where there are as many; those chosen by no finite number are not.
        scaling, softcap: see `attend_coded`.
        using: the variant.

    Returns:
        out (b * h, g, 1, dv) float32, lse (b * h, g, 1) float32, tokens (b * h,) int32 that were read.
    """
    owners, group, _, size = query.shape
    asked = query.reshape(owners, group, size).to(torch.float32).contiguous()
    choice, _kept = pages_of(states, BestPages(page=page, most=most, bounds=bounds), group)
    lengths, rows = torch.empty(owners, dtype=torch.int32), torch.empty((2, owners, choice.room), dtype=torch.int64)
    key_rows, value_rows = rows[0].data_ptr(), rows[1].data_ptr()
    call = _call_of_rows(asked, states[0], (key_rows, value_rows), choice.room, scaling, softcap, using)
    choice.query, choice.key_rows, choice.value_rows = call.query, key_rows, value_rows
    choice.lengths = call.lengths = lengths.data_ptr()
    choice.threads = call.threads
    functions = using.functions
    scratch = torch.empty(functions.kvtailor_pages_scratch(ctypes.byref(choice)), dtype=torch.float32)
    choice.scratch = scratch.data_ptr()
    _, out, lse = _run(functions.kvtailor_choose_pages, choice, call, using)
    return out, lse, lengths


def pages_of(states: Sequence[tuple[Tensor, Tensor]], pages: BestPages, group: int) -> tuple[Pages, list[Any]]:
    """Return what is chosen from as C++ sees it, but for the query and what is written; and the tables it points to.

    Args:
        states: see `attend_best_pages`.
        pages: of these parts.
        group: g, query heads of a kv head.
    """
    bounds, tables, pointers = pages.bounds, _tables(states), ctypes.c_void_p * len(states)
    low, high = (pointers(*(None if each is None else each[side].data_ptr() for each in bounds)) for side in (0, 1))
    count = sum(0 if each is None else each[0].shape[1] for each in bounds)
    wanted = min(pages.most, count)
    rest = sum(keys.shape[1] for (keys, _), each in zip(states, bounds, strict=True) if each is None)
    keys = states[0][0]
    choice = Pages(
        low=ctypes.addressof(low),
        high=ctypes.addressof(high),
        **{name: ctypes.addressof(table) for name, table in tables.items()},
        owners=keys.shape[0],
        rows=group,
        size=keys.shape[2],
        parts=len(states),
        pages=count,
        page=pages.page,
        wanted=wanted,
        room=wanted * pages.page + rest,
        kind=DTYPES[keys.dtype],
    )
    return choice, [tables, low, high]


def _call_of_rows(
    asked: Tensor,
    states: tuple[Tensor, Tensor],
    rows: tuple[int, int],
    slots: int,
    scaling: float,
    softcap: float | None,
    using: Library,
) -> Call:
    """A call over tokens that lie anywhere: states like these, at the addresses in two tables (n, slots)."""
    sides = [side_of_rows(each, at) for at, each in zip(rows, states, strict=True)]
    call = Call(query=asked.data_ptr(), keys=sides[0], values=sides[1])
    call.owners = call.lanes = asked.shape[0]
    call.slots, call.rows, call.queries, call.scaling, call.softcap = slots, asked.shape[1], 1, scaling, softcap or 0.0
    choose_threads(call, using)
    return call


def side_of_rows(states: Tensor, rows: int | None = None) -> Side:
    """Return a side of tokens like these (m, s, d), which lie at the addresses in a table."""
    size = states.shape[2]
    kind, slot = DTYPES[states.dtype], size * states.element_size()
    return Side(data=rows, low=rows, kind=kind, size=size, slot_bytes=slot)


def _run(function: Any, choice: Choice | Pages, call: Call, using: Library) -> tuple[bool, Tensor, Tensor]:
    """Let a function choose and read; whether it could not, outputs (n, g, 1, dv) and lse (n, g, 1)."""
    out = torch.empty((call.owners, call.rows, 1, call.values.size), dtype=torch.float32)
    lse = torch.empty((call.owners, call.rows, 1), dtype=torch.float32)
    at = ctypes.byref(call)
    found = torch.empty(using.functions.kvtailor_found(at), dtype=torch.float32)
    scratch = torch.empty(using.functions.kvtailor_scratch(at), dtype=torch.float32)
    call.out, call.lse, call.found, call.scratch = (each.data_ptr() for each in (out, lse, found, scratch))
    wrong = function(ctypes.byref(choice), at)
    if wrong > 0:
        raise RuntimeError(_REFUSED)
    return wrong < 0, out, lse


def _tables(states: Sequence[tuple[Tensor, Tensor]]) -> dict[str, ctypes.Array[ctypes.c_int64]]:
    """Return addresses, strides in bytes and slots of each part."""
    element, number = states[0][0].element_size(), ctypes.c_int64 * len(states)
    found = {"slots": number(*(keys.shape[1] for keys, _ in states))}
    for side, (name, of) in enumerate((("keys", "key"), ("values", "value"))):
        mine = [each[side] for each in states]
        found[name] = number(*(each.data_ptr() for each in mine))
        found[f"{of}_lane"] = number(*(each.stride(0) * element for each in mine))
        found[f"{of}_slot"] = number(*(each.stride(1) * element for each in mine))
    return found


def unsuited_pages(keys: Coded, values: Coded) -> str | None:
    """Why chosen pages of these sides cannot be read here, a clause; None where they can."""
    sides = [side.states for side in (keys, values) if isinstance(side, Whole)]
    if len(sides) < 2:
        return "pages are read of plain states alone"
    if any(side.device.type != "cpu" or side.dtype not in DTYPES or side.stride(2) != 1 for side in sides):
        return "the C++ kernels read float32, bfloat16 and float16 on the CPU"
    # A page is found by its slot, so lanes must begin so many whole slots apart, on both sides as many.
    (lane, slot, _), (other_lane, other_slot, _) = (side.stride() for side in sides)
    if not slot or not other_slot or lane % slot or other_lane % other_slot or lane // slot != other_lane // other_slot:
        return "lanes do not begin a whole number of slots apart"
    return None


def unsuited_bounds(query: Tensor, low: Tensor, high: Tensor) -> str | None:
    """Why bounds cannot be found here, a clause; None where they can."""
    if query.device.type != "cpu" or low.dtype not in DTYPES or low.dtype != high.dtype:
        return f"the C++ kernels read bounds of one of float32, bfloat16 and float16 on the CPU, not {low.dtype}"
    return None


def page_bounds(query: Tensor, low: Tensor, high: Tensor, owner: Tensor | None, *, using: Library) -> Tensor:
    """The greatest product that any query of a group can have with a key of a page.

    Args:
        query: (n, g, d) one new token's.
        low, high: (m, p, d) least and greatest of each key channel over a page, of one dtype.
        owner: (m,) int64 ascending row * h + head of each lane; None: lane i belongs to owner i.
        using: the variant.

    Returns:
        (m, p) float32; NaN where a query is.
    """
    # Each row counts as a query of its own, for which there is room then.
    call, held = make_call(
        AttentionInputs(query[:, None], Whole(states=low), Whole(states=high), scaling=1.0, owner=owner)
    )
    bounds = torch.empty(low.shape[:2], dtype=torch.float32)
    choose_threads(call, using)
    scratch = torch.empty(using.functions.kvtailor_scratch(ctypes.byref(call)), dtype=torch.float32)
    held += [bounds, scratch]
    call.mass, call.scratch = bounds.data_ptr(), scratch.data_ptr()
    if using.functions.kvtailor_bounds(ctypes.byref(call)):
        raise RuntimeError(_REFUSED_BOUNDS)
    return bounds


def attend_pages(inputs: AttentionInputs, pages: Tensor, page: int, *, using: Library) -> tuple[Tensor, Tensor]:
    """`attend_coded` over some pages of each lane, of which nothing else is read.

    Args:
        inputs: of plain keys and values, see `unsuited_pages`; without lengths and weights.
        pages: (m, k) pages of `page` slots to read, each at most once, -1 for none. The last page of a lane may be cut
            short by its end.
        page: slots of a page.
        using: the variant.
    """
    query, keys, values, visible = inputs.query, inputs.keys, inputs.values, inputs.visible
    assert isinstance(keys, Whole) and isinstance(values, Whole)
    lanes, slots, _ = keys.states.shape
    # Adjacent pages one behind the other are read in one go. Row-major, so owners stay in order.
    pages = pages.sort(1).values
    here = pages >= 0
    lane, first = here.nonzero()[:, 0], pages[here].to(torch.int64) * page
    # What the call takes for lanes are pages, each of which begins at a slot of its own; a lane's last may end early.
    size = min(page, slots)
    sides = [Whole(states=side.states[:1, :size].expand(lane.shape[0], -1, -1)) for side in (keys, values)]
    seen = None
    if visible is not None:
        slot = (first[:, None] + torch.arange(size)).clamp(max=slots - 1)
        seen = visible.expand(lanes, query.shape[2], slots)[lane[:, None], :, slot].transpose(1, 2)
    owners, lengths = lane if inputs.owner is None else inputs.owner[lane], (slots - first).clamp(max=size)
    call, held = make_call(inputs._replace(keys=sides[0], values=sides[1], owner=owners, lengths=lengths, visible=seen))
    starts = lane * (keys.states.stride(0) // keys.states.stride(1)) + first
    held += [starts, keys.states, values.states]
    call.starts = starts.data_ptr()
    return run(call, held, query.shape, using)
