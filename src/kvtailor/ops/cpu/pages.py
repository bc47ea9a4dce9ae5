"""Which pages of plain keys could matter to a query, and attention over the chosen ones where they lie, in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvtailor.ops.cpu.attention import choose_threads, make_call, run
from kvtailor.ops.cpu.library import DTYPES, Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, Whole

__all__ = ["attend_pages", "page_bounds", "unsuited_bounds", "unsuited_pages"]

_REFUSED = "torch_parallel_for refused to run kvtailor's kernel of page bounds"


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
        raise RuntimeError(_REFUSED)
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
