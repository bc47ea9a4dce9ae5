"""Attention of few queries over the compressed bytes of segments, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, layout_of
from kvtailor.ops.triton.installed import unfit
from kvtailor.ops.triton.launches import Part, plan_of
from kvtailor.ops.triton.sides import side_of, why_not

__all__ = ["Part", "attend_coded", "attend_pages", "attend_parts", "suits"]

# The most query rows (query heads of a kv head times new tokens) of a program.
_ROWS = 32


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
    return attend_parts([Part(inputs=inputs, causal=causal, splits=splits)])


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
    return attend_parts([Part(inputs=inputs, pages=pages, page=page, splits=splits)])


def attend_parts(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """`attend_coded` of one query over the slots of several parts, with one softmax over all of them."""
    return plan_of(parts)()
