"""Attention of few queries over the compressed bytes of segments, on a GPU.

Programs take shares of every lane of each part, and others add up what these leave (`plan_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvtailor.ops.attention.triton.kernels.decode import split_kernel
from kvtailor.ops.attention.triton.kernels.merge import merge_kernel
from kvtailor.ops.attention.triton.sides import SideArguments, block_of, side_of, warps_of, why_not
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, layout_of
from kvtailor.ops.triton_launch import LOG2E, Launch, interpreting, unfit

__all__ = ["LanesRead", "Launches", "plan_of", "attend_coded", "attend_pages", "attend_parts", "suits"]


# Tables of `_firsts` by the first ragged part's owners; those of even parts are alike on all layers.
_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_EVEN = torch.empty(0, dtype=torch.float32)
# Tokens that a program should read at least, so that what it leaves behind is small beside them.
_SHARE = 256
# The most query rows (query heads of a kv head times new tokens) of a program.
_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The launches of an attention and what they write.

    Attributes:
        calls: in their order.
        out: (n, g, t, dv) float32. lse: (n, g, t) float32.
    """

    calls: tuple[Launch, ...]
    out: Tensor
    lse: Tensor

    def __call__(self) -> tuple[Tensor, Tensor]:
        for call in self.calls:
            call()
        return self.out, self.lse


@dataclass(frozen=True, kw_only=True)
class LanesRead:
    """Lanes that are read at once: the arguments of `attend_coded`, or of `attend_pages`.

    Attributes:
        pages: (m, p) int32 pages of `page` slots of each lane that are read, -1 for none; None: all slots.
        inputs, causal, splits: see `attend_coded`.
    """

    inputs: AttentionInputs
    causal: bool = False
    pages: Tensor | None = None
    page: int | None = None
    splits: int | None = None


def plan_of(parts: Sequence[LanesRead], *, processors: int | None = None) -> Launches:
    """What `attend_parts` launches; tensors on any device.

    Args:
        parts: at least one, all of one query, factor and cap.
        processors: of the device; None: read from it.
    """
    query, scaling, softcap = parts[0].inputs.query, parts[0].inputs.scaling, parts[0].inputs.softcap
    owners, group, new, _ = query.shape
    rows = group * new
    processors = processors or _processors(query.device)
    shapes = [_Shape.of(part, rows, processors) for part in parts]
    bases = [0, *accumulate(shape.lanes * shape.splits for shape in shapes)]
    size = shapes[0].right.size
    empty = lambda *shape: query.new_empty(shape, dtype=torch.float32)  # noqa: E731
    sums, tops, totals = empty(bases[-1], rows, size), empty(bases[-1], rows), empty(bases[-1], rows)
    out, lse = empty(owners, group, new, size), empty(owners, group, new)
    flat = query.reshape(owners, rows, -1).contiguous()
    splits = [
        _split_call(flat, part, shape, new, (scaling, softcap), sums[base:], tops[base:], totals[base:])
        for part, shape, base in zip(parts, shapes, bases, strict=False)
    ]
    alone = len(parts) == 1 and parts[0].inputs.owner is None
    merge = Launch(
        kernel=merge_kernel,
        grid=(owners, rows),
        arguments={
            "SUM": sums,
            "TOP": tops,
            "TOTAL": totals,
            "FIRST": None if alone else _firsts(parts, shapes, bases, owners, query.device),
            "OUT": out,
            "LSE": lse,
            "splits": shapes[0].splits,
            "parts": len(parts),
            "ROWS": rows,
            "SIZE": size,
            "PAD": triton.next_power_of_2(size),
            "BLOCK": 16,
        },
        warps=4,
        stages=2,
    )
    return Launches(calls=(*splits, merge), out=out, lse=lse)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """How a part is divided among programs.

    Attributes:
        left, right: its keys and values.
        lanes, slots: m and s. held: slots that a lane reads, of its pages where there are some.
        block, warps: of a program. splits: programs of a lane.
    """

    left: SideArguments
    right: SideArguments
    lanes: int
    slots: int
    held: int
    block: int
    warps: int
    splits: int

    @classmethod
    def of(cls, part: LanesRead, rows: int, processors: int) -> _Shape:
        left, right = (side_of(layout_of(each)) for each in (part.inputs.keys, part.inputs.values))
        lanes, slots = left.codes.shape[:2]
        held = slots if part.pages is None or part.page is None else part.pages.shape[1] * part.page
        block = block_of(left, right, rows, part.page)
        warps = warps_of(block, left, right, rows)
        splits = part.splits or _splits(lanes, held, warps, processors)
        return cls(left=left, right=right, lanes=lanes, slots=slots, held=held, block=block, warps=warps, splits=splits)


def _split_call(
    query: Tensor,
    part: LanesRead,
    shape: _Shape,
    new: int,
    logits: tuple[float, float | None],
    sums: Tensor,
    tops: Tensor,
    totals: Tensor,
) -> Launch:
    """The launch that reads one part for queries (n, g * t, d) and leaves what it found at the head of the three."""
    scaling, softcap = logits
    rows, block, left, right = query.shape[1], shape.block, shape.left, shape.right
    visible, log_weight, pages = part.inputs.visible, part.inputs.log_weight, part.pages
    seen = None if visible is None else visible.expand(shape.lanes, new, shape.slots).view(torch.uint8)
    strides = (0, 0, 0) if seen is None else seen.stride()
    masked = visible is not None or log_weight is not None
    return Launch(
        kernel=split_kernel,
        grid=(shape.lanes, shape.splits),
        arguments={
            "Q": query,
            "OWNER": part.inputs.owner,
            "LENGTHS": part.inputs.lengths,
            "SEEN": seen,
            "WEIGHT": None if log_weight is None else log_weight.contiguous(),
            "PAGES": None if pages is None else pages.contiguous(),
            "SUM": sums,
            "TOP": tops,
            "TOTAL": totals,
            "capacity": shape.slots,
            "slots": shape.held,
            "factor": scaling * LOG2E,
            "cap": None if softcap is None else softcap * LOG2E,
            **dict(zip(("seen_lane", "seen_new", "seen_slot"), strides, strict=True)),
            "weight_lane": shape.slots,
            "pages_lane": 0 if pages is None else pages.shape[1],
            "ROWS": rows,
            "M": max(8, triton.next_power_of_2(rows)),
            "NEW": new,
            "BLOCK": block,
            "PAGE": part.page or block,
            "SEEN_NEW": visible is not None and visible.ndim > 1 and visible.shape[-2] > 1,
            "CAUSAL": part.causal and new > 1,
            "ASM": not interpreting(),
            **left.arguments("K", block, part.page),
            **right.arguments("V", block, part.page),
        },
        warps=shape.warps,
        stages=3,
        registers=255 if rows > 16 or masked or 8 in (left.bits, right.bits) else None,
    )


def _firsts(
    parts: Sequence[LanesRead], shapes: Sequence[_Shape], bases: Sequence[int], owners: int, device: torch.device
) -> Tensor:
    """(parts, n + 1) int32: where in what the programs leave each owner's begins, and the end of each part's.

    The newest is kept for as long as its lanes are, so that it is made for the first of many tokens alone.
    """
    ragged = tuple(part.inputs.owner for part in parts)
    key = tuple(shape.splits for shape in shapes), tuple(bases), owners, device
    anchor = _EVEN if (first := next((each for each in ragged if each is not None), None)) is None else first
    made_of, its, kept = _KNOWN.get(anchor, ((), None, None))
    if its == key and all(one is other for one, other in zip(made_of, ragged, strict=True)):
        assert isinstance(kept, Tensor)
        return kept
    each = torch.arange(owners + 1, device=device)
    starts = [each if owner is None else torch.searchsorted(owner, each) for owner in ragged]
    table = torch.stack(
        [start * shape.splits + base for start, shape, base in zip(starts, shapes, bases, strict=False)]
    )
    table = table.to(torch.int32)
    # What a graph makes while it is recorded is there only when it is replayed.
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _KNOWN[anchor] = ragged, key, table
    return table


def _splits(lanes: int, slots: int, warps: int, processors: int) -> int:
    """Programs for each lane: about eight warps for each processor in all, and none for less than `_SHARE` slots."""
    return max(1, min(-(-8 * processors // (warps * lanes)), slots // _SHARE))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def suits(query: Tensor, keys: Coded, values: Coded) -> str | None:
    """Why `attend_coded` cannot take these; None where it can.

    Args:
        query: (n, g, t, d). keys, values: sides of a segment.
    """
    rows = query.shape[1] * query.shape[2]
    if rows > _ROWS:
        heads, new = query.shape[1:3]
        return f"at most {_ROWS} query rows for each kv head are read at once, found {heads} heads x {new} tokens"
    for name, side in (("keys", keys), ("values", values)):
        reason = why_not(side)
        if reason is not None:
            return f"{name}: {reason}"
    return unfit(query.device, query.dtype, *(side_of(layout_of(each)).dtype for each in (keys, values)))


def attend_coded(inputs: AttentionInputs, *, causal: bool = False, splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Attention of the new tokens over every slot of some lanes, from their bytes.

    Products are float16 for coded sides (states of a magnitude above 65504 are not told apart), of their own dtype for
    plain ones, with float32 sums.

    Args:
        inputs: see `AttentionInputs`, which also says what is returned, and `suits`. Lengths may lie on the device;
            slots behind them are not read.
        causal: the last t filled slots of each lane are the new tokens themselves, and none sees a later one.
        splits: programs for each lane; None: as many as fill the device.
    """
    return attend_parts([LanesRead(inputs=inputs, causal=causal, splits=splits)])


def attend_pages(
    inputs: AttentionInputs, pages: Tensor, page: int, *, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """`attend_coded` over some pages of each lane, of which nothing else is read.

    Args:
        inputs, splits: see `attend_coded`.
        pages: (m, p) int32 pages of `page` slots to read, each at most once, -1 for none. The last page of a lane may
            be cut short by its end.
        page: slots of a page, a power of two.
    """
    if page < 1 or page & (page - 1):
        raise ValueError(f"pages hold a power of two of slots, found {page}")
    return attend_parts([LanesRead(inputs=inputs, pages=pages, page=page, splits=splits)])


def attend_parts(parts: Sequence[LanesRead]) -> tuple[Tensor, Tensor]:
    """`attend_coded` of one query over the slots of several parts, with one softmax over all of them."""
    return plan_of(parts)()
