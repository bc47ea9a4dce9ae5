"""Attention of few queries over the compressed bytes of a segment, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvtailor.ops.coded import Coded
from kvtailor.ops.triton.call import LOG2E, Call
from kvtailor.ops.triton.installed import interpreting, unfit
from kvtailor.ops.triton.kernels.decode import split_kernel
from kvtailor.ops.triton.kernels.merge import merge_kernel
from kvtailor.ops.triton.sides import block_of, side_of, warps_of, why_not

__all__ = ["Plan", "attend_coded", "attend_pages", "plan_of", "suits"]

# The most query rows (query heads of a kv head times new tokens) of a program.
_ROWS = 32
# Tokens that a program should read at least, so that what it leaves behind is small beside them.
_SHARE = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The two launches of an attention and what they write.

    Attributes:
        calls: in their order.
        out: (n, g, t, dv) float32. lse: (n, g, t) float32.
    """

    calls: tuple[Call, ...]
    out: Tensor
    lse: Tensor

    def __call__(self) -> tuple[Tensor, Tensor]:
        for call in self.calls:
            call()
        return self.out, self.lse


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
    sides = (side_of(keys), side_of(values))
    return unfit(query.device, query.dtype, *((x.codes if x.step is None else x.step).dtype for x in sides))


def attend_coded(
    query: Tensor,
    keys: Coded,
    values: Coded,
    *,
    scaling: float,
    owner: Tensor | None = None,
    visible: Tensor | None = None,
    log_weight: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the new tokens over every slot of some lanes, from their bytes.

    Products are float16 for coded sides (states of a magnitude above 65504 are not told apart), of their own dtype for
    plain ones, with float32 sums.

    Args:
        query: (n, g, t, d) any float dtype, n = b * h.
        keys, values: of m lanes of s slots; see `suits`.
        scaling: factor before the softmax.
        owner: (m,) int64 ascending row * h + head of each lane; None where lane i belongs to owner i.
        visible: bool that broadcasts to (m, t, s); None where every query sees every slot.
        log_weight: (m, s) float32 added to the logits; None: nothing.
        lengths: (m,) int32 filled slots of each lane, which may lie on the device; the others are not read.
        causal: the last t filled slots of each lane are the new tokens themselves, and none sees a later one.
        splits: programs for each lane; None: as many as fill the device.

    Returns:
        out (n, g, t, dv) float32, zeros where a query sees nothing; lse (n, g, t) float32, -inf there.
    """
    return plan_of(
        query,
        keys,
        values,
        scaling=scaling,
        owner=owner,
        visible=visible,
        log_weight=log_weight,
        lengths=lengths,
        causal=causal,
        splits=splits,
    )()


def attend_pages(
    query: Tensor,
    keys: Coded,
    values: Coded,
    pages: Tensor,
    page: int,
    *,
    scaling: float,
    owner: Tensor | None = None,
    visible: Tensor | None = None,
    lengths: Tensor | None = None,
    log_weight: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_coded` over some pages of each lane, of which nothing else is read.

    Args:
        query: (n, g, t, d). keys, values: of m lanes.
        pages: (m, p) int32 pages of `page` slots to read, each at most once, -1 for none. The last page of a lane may
            be cut short by its end.
        page: slots of a page, a power of two.
        Others: see `attend_coded`.
    """
    if page < 1 or page & (page - 1):
        raise ValueError(f"pages hold a power of two of slots, found {page}")
    plan = plan_of(
        query,
        keys,
        values,
        scaling=scaling,
        owner=owner,
        visible=visible,
        lengths=lengths,
        log_weight=log_weight,
        pages=pages,
        page=page,
        splits=splits,
    )
    return plan()


def plan_of(
    query: Tensor,
    keys: Coded,
    values: Coded,
    *,
    scaling: float,
    owner: Tensor | None = None,
    visible: Tensor | None = None,
    log_weight: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    pages: Tensor | None = None,
    page: int | None = None,
    splits: int | None = None,
    processors: int | None = None,
) -> Plan:
    """What `attend_coded` and `attend_pages` launch; tensors on any device.

    Args:
        pages: (m, p) int32 pages of `page` slots of each lane that are read, -1 for none; None: all slots.
        processors: of the device; None: asked of it.
        Others: see `attend_coded`.
    """
    owners, group, new, _ = query.shape
    rows = group * new
    left, right = side_of(keys), side_of(values)
    lanes, slots = left.codes.shape[:2]
    held = slots if pages is None or page is None else pages.shape[1] * page
    block = block_of(left, right, rows, page)
    warps = warps_of(block, left, right, rows)
    if splits is None:
        splits = _splits(lanes, held, warps, processors or _processors(query.device))
    new_empty = lambda *shape: query.new_empty(shape, dtype=torch.float32)  # noqa: E731
    sums = new_empty(lanes, splits, rows, right.size)
    tops, totals = new_empty(lanes, splits, rows), new_empty(lanes, splits, rows)
    out, lse = new_empty(owners, group, new, right.size), new_empty(owners, group, new)
    seen = None if visible is None else visible.expand(lanes, new, slots).view(torch.uint8)
    masked = visible is not None or log_weight is not None
    strides = (0, 0, 0) if seen is None else seen.stride()
    split = Call(
        kernel=split_kernel,
        grid=(lanes, splits),
        arguments={
            "Q": query.reshape(owners, rows, -1).contiguous(),
            "OWNER": owner,
            "LENGTHS": lengths,
            "SEEN": seen,
            "WEIGHT": None if log_weight is None else log_weight.contiguous(),
            "PAGES": None if pages is None else pages.contiguous(),
            "SUM": sums,
            "TOP": tops,
            "TOTAL": totals,
            "capacity": slots,
            "slots": held,
            "factor": scaling * LOG2E,
            **dict(zip(("seen_lane", "seen_new", "seen_slot"), strides, strict=True)),
            "weight_lane": slots,
            "pages_lane": 0 if pages is None else pages.shape[1],
            "ROWS": rows,
            "M": max(8, triton.next_power_of_2(rows)),
            "NEW": new,
            "BLOCK": block,
            "PAGE": page or block,
            "SEEN_NEW": visible is not None and visible.ndim > 1 and visible.shape[-2] > 1,
            "CAUSAL": causal and new > 1,
            "ASM": not interpreting(),
            **left.arguments("K", block, page),
            **right.arguments("V", block, page),
        },
        warps=warps,
        stages=3,
        registers=255 if rows > 16 or masked or 8 in (left.bits, right.bits) else None,
    )
    merge = Call(
        kernel=merge_kernel,
        grid=(owners, rows),
        arguments={
            "SUM": sums,
            "TOP": tops,
            "TOTAL": totals,
            "FIRST": None if owner is None else _first_lanes(owner, owners),
            "OUT": out,
            "LSE": lse,
            "splits": splits,
            "ROWS": rows,
            "SIZE": right.size,
            "PAD": triton.next_power_of_2(right.size),
            "BLOCK": 16,
        },
        warps=4,
        stages=2,
    )
    return Plan(calls=(split, merge), out=out, lse=lse)


def _first_lanes(owner: Tensor, owners: int) -> Tensor:
    return torch.searchsorted(owner, torch.arange(owners + 1, device=owner.device)).to(torch.int32)


def _splits(lanes: int, slots: int, warps: int, processors: int) -> int:
    """Programs for each lane: about eight warps for each processor in all, and none for less than `_SHARE` slots."""
    return max(1, min(-(-8 * processors // (warps * lanes)), slots // _SHARE))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
