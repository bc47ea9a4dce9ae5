"""Which tokens a cheap guess of their logits puts first, and attention over these where they lie, in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.ops.cpu.attention import run_with, threads_for
from kvtailor.ops.cpu.library import DTYPES, Call, Choice, Library, Side

__all__ = ["Candidates", "attend_chosen", "unsuited_states"]

# Of so many channels, or a multiple, the states of a token fill vectors in every variant.
_WHOLE = 32


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


def unsuited_states(states: Sequence[tuple[Tensor, Tensor]], bounds: Tensor | None, using: Library) -> str | None:
    """Why tokens of parts with these keys and values (m, s, d) cannot be chosen here, a clause; None where they can."""
    if not using.has("kvtailor_choose"):
        return "the C++ kernels were built from sources that choose no tokens: build them again"
    dtype = states[0][0].dtype
    every = [each for both in states for each in both]
    if any(each.dtype != dtype or each.device.type != "cpu" or each.stride(2) != 1 for each in every):
        return "parts are not of one type on the CPU"
    if dtype not in DTYPES or any(each.shape[2] % _WHOLE for each in every):
        return f"float32, bfloat16 and float16 are read, of a multiple of {_WHOLE} channels"
    if bounds is not None and (bounds.dtype != dtype or not bounds.is_contiguous()):
        return "bounds are not of the keys' type"
    return None


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
    keys, values = states[0]
    chunks = 0 if candidates.bounds is None else candidates.bounds.shape[2]
    widest = chunks + candidates.tokens - min(candidates.covered)
    scores = torch.empty((owners, widest), dtype=torch.float32)
    rows = torch.empty((2, owners, budget), dtype=torch.int64)
    element, wide = keys.element_size(), values.shape[2]

    def numbers(found: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * len(found))(*found)

    parts = [
        numbers([each.data_ptr() for each, _ in states]),
        numbers([each.data_ptr() for _, each in states]),
        *(numbers([each.stride(axis) * element for each, _ in states]) for axis in (0, 1)),
        *(numbers([each.stride(axis) * element for _, each in states]) for axis in (0, 1)),
        numbers([each.shape[1] for each, _ in states]),
        numbers(candidates.span),
        numbers(candidates.channels),
        numbers(candidates.covered),
    ]
    at = [ctypes.addressof(each) for each in parts]
    listed = candidates.listed
    kind, (key_rows, value_rows) = DTYPES[keys.dtype], (each.data_ptr() for each in rows)
    call = Call(
        query=asked.data_ptr(),
        keys=Side(data=key_rows, low=key_rows, kind=kind, size=size, slot_bytes=size * element),
        values=Side(data=value_rows, low=value_rows, kind=kind, size=wide, slot_bytes=wide * element),
    )
    call.owners = call.lanes = owners
    call.slots, call.rows, call.queries, call.scaling, call.softcap = budget, group, 1, scaling, softcap or 0.0
    threads_for(call, using)
    choice = Choice(
        query=call.query,
        bounds=None if candidates.bounds is None else candidates.bounds.data_ptr(),
        **dict(zip(("keys", "values", "key_lane", "key_slot", "value_lane", "value_slot", "slots"), at, strict=False)),
        span=at[7],
        channels=at[8],
        covered=at[9],
        listed=None if listed is None else listed.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        scores=scores.data_ptr(),
        key_rows=key_rows,
        value_rows=value_rows,
        parallel_for=call.parallel_for,
        owners=owners,
        rows=group,
        size=size,
        chunks=chunks,
        count_listed=0 if listed is None else listed.shape[1],
        after=candidates.after,
        tokens=candidates.tokens,
        budget=budget,
        widest=widest,
        kind=kind,
        threads=call.threads,
        scaling=scaling,
        softcap=softcap or 0.0,
    )
    functions = using.functions
    scratch = torch.empty(functions.kvtailor_choice_scratch(ctypes.byref(choice)), dtype=torch.float32)
    choice.scratch = scratch.data_ptr()
    wrong, out, lse = run_with(functions.kvtailor_choose, call, (owners, group, 1), using, ctypes.byref(choice))
    if wrong < 0:
        raise CacheMisuse(
            f"scores of shape {tuple(scores.shape)} hold NaN, so no order exists; look for NaN in keys, queries or mass"
        )
    return out, lse, scores
