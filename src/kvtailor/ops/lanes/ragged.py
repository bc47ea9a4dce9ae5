"""From a kept set to lanes: how many slots, which token in which, and back to padded rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.types import Held, Layout, PlainSegment
from kvtailor.types.late_checks import send

__all__ = [
    "Cut",
    "cut_lanes",
    "cut_of_part",
    "gather_held",
    "page_size",
    "places_of_slots",
    "slots_of_part",
    "tokens_of_part",
]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where the tokens of a kept set go.

    Attributes:
        index: (m, s) int64 for each new slot the index, along n, of the token that fills it. Filler repeats the
            last one of its lane.
        owner: (m,) int64 row * heads + head; None where lane i belongs to owner i.
        lengths: (m,) int32 filled slots; None where all are.
        owners: (m,) int64, always given.
        counts: (b * h,) int64 on the CPU: tokens of each owner.
    """

    index: Tensor
    owner: Tensor | None
    lengths: Tensor | None
    owners: Tensor
    counts: Tensor

    def layout(self, rows: int, heads: int, positions: Tensor) -> Layout:
        """The layout of these lanes, given the (b, h, n) columns of the tokens that were cut from."""
        # (m, 1) owners beside (m, s) indices: for each slot of each lane the column of the token that fills it.
        columns = positions.reshape(rows * heads, -1)[self.owners[:, None], self.index].to(torch.int32)
        return Layout(
            rows=rows, heads=heads, size=self.index.shape[1], positions=columns, owner=self.owner, lengths=self.lengths
        ).counted(self.counts)


def page_size(mean: float, multiple: int = 1) -> int:
    """Slots of a ragged lane where an owner holds `mean` tokens on average.

    A power of two between a twenty-fourth and a twelfth of it, so that the half page that each owner wastes is 2 to 4 %
    of what it holds, and within 16 to 256: attention over lanes of 16 slots takes twice the time of lanes of 128, and
    beyond 256 nothing is gained. Rounded up to `multiple`.
    """
    page = 16
    while page * 24 <= mean and page < 256:
        page *= 2
    return -(-page // multiple) * multiple


def cut_lanes(keep: Tensor, multiple: int = 1, counts: Tensor | None = None) -> Cut | None:
    """Lanes for a kept set.

    Args:
        keep: (b, h, n) bool.
        multiple: ragged lanes have a multiple of this many slots.
        counts: (b, h) int64 on the CPU: how many each row and head keeps; None: the host waits for them.

    Returns:
        One lane for each row and head where all keep the same number; else pages; None where nothing is kept.
    """
    flat = keep.flatten(0, 1)
    on_host = flat.sum(-1).cpu() if counts is None else counts.flatten()
    most, least = int(on_host.max()), int(on_host.min())
    if most == 0:
        return None
    # A stable sort by "not kept" lists each owner's kept tokens first, in time order.
    order = torch.argsort((~flat).to(torch.uint8), dim=-1, stable=True)[:, :most]
    owners = torch.arange(flat.shape[0], device=keep.device)
    if most == least:
        return Cut(index=order, owner=None, lengths=None, owners=owners, counts=on_host)
    # Ragged: owner o gets ceil(counts[o] / page) lanes, one after the other.
    page = page_size(float(on_host.float().mean()), multiple)
    each, pages = send(on_host, keep.device), (on_host + page - 1) // page
    lanes, pages = int(pages.sum()), send(pages, keep.device)
    owner = torch.repeat_interleave(owners, pages, output_size=lanes)
    # (m,) the number of a lane among its owner's: its place among all, less the lanes of the owners before.
    before = torch.repeat_interleave(pages.cumsum(0) - pages, pages, output_size=lanes)
    first = torch.arange(lanes, device=keep.device) - before
    # (m, page) the number of each slot's token among the kept ones of its owner; past the last it is filler, which
    # repeats that last token, so that it holds finite numbers of the same head.
    slot = first[:, None] * page + torch.arange(page, device=keep.device)
    lengths = (each[owner] - first * page).clamp(max=page)
    index = order[owner[:, None], torch.minimum(slot, each[owner][:, None] - 1)]
    return Cut(index=index, owner=owner, lengths=lengths.to(torch.int32), owners=owner, counts=on_host)


def cut_of_part(layout: Layout, slots: Tensor) -> Cut:
    """The lanes of a part of which every token is kept, where they lie.

    Args:
        layout: of the part.
        slots: (m, s) int64, see `slots_of_part`.
    """
    index, lengths = slots, layout.lengths
    if lengths is not None:
        last = lengths.to(slots.device, torch.int64)[:, None] - 1
        index = torch.minimum(slots, slots[:, :1] + last.clamp(min=0))
    owners, counts = layout.owners(slots.device), layout.counts().flatten()
    return Cut(index=index, owner=layout.owner, lengths=lengths, owners=owners, counts=counts)


def slots_of_part(layout: Layout, before: Tensor) -> Tensor:
    """Where each slot of a part stands among all that its owner holds.

    Args:
        layout: of the part. The lanes of one owner follow each other, all full but the last.
        before: (b * h,) int64 tokens that each owner holds in earlier parts.

    Returns:
        (m, s) int64 index along the padded n axis; filler slots get indices past the owner's tokens in this part, to be
        masked by `layout.filled`.
    """
    owners = layout.owners(before.device)
    slot = torch.arange(layout.size, device=before.device)[None]
    if layout.owner is None:
        return before[:, None] + slot
    lane = torch.arange(owners.shape[0], device=before.device)
    # Owners ascend, so the first place at which an owner could stand is its first lane.
    first_lane = torch.searchsorted(owners, owners)
    return before[owners][:, None] + (lane - first_lane)[:, None] * layout.size + slot


def gather_held(held: Held, cut: Cut) -> PlainSegment:
    """The kept tokens of padded rows, in the lanes of a cut."""
    b, h = held.keys.shape[:2]
    at = cut.owners[:, None], cut.index
    keys, values = (huge_pages.picked(states.flatten(0, 1), at) for states in (held.keys, held.values))
    return PlainSegment(layout=cut.layout(b, h, held.positions), keys=keys, values=values)


def tokens_of_part(layout: Layout, slots: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kept tokens (b, h, n) that one part holds, and for each of them its lane and slot there (b * h, n)."""
    flat = keep.flatten(0, 1)
    here = torch.ones_like(slots, dtype=torch.bool)
    lane = torch.arange(layout.lanes, device=flat.device)[:, None].expand_as(slots)
    place = torch.arange(layout.size, device=flat.device)[None].expand_as(slots)
    # The inverse of `slots`: from (lane, slot of the part) to (owner, index along n).
    at, whole = places_of_slots(layout, slots, flat.shape[1]), flat.numel()
    mine, lane_of, slot_of = (
        each.new_zeros(whole + 1).scatter_(0, at, each.reshape(-1))[:whole].view_as(flat)
        for each in (here, lane, place)
    )
    return (mine & flat).view_as(keep), lane_of, slot_of


def places_of_slots(layout: Layout, slots: Tensor, longest: int) -> Tensor:
    """Where each slot of a part stands in padded rows (b * h, n) that are laid out one behind the other.

    Args:
        layout: of the part.
        slots: (m, s) int64, see `slots_of_part`.
        longest: n.

    Returns:
        (m * s,) int64. Filler is behind the rows, at b * h * n: its indices in `slots` run past the owner's tokens in
        this part and would name those of the next.
    """
    at = layout.owners(slots.device)[:, None] * longest + slots
    filled = layout.filled(slots.device)
    if filled is not None:
        at = at.masked_fill(~filled, layout.rows * layout.heads * longest)
    return at.flatten()
