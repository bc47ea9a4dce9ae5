"""What each row and kv head holds, as one run of real tokens in time order, whatever parts and lanes they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.ops.lanes.slots import at_slots
from kvtailor.types import Layout, Segment

__all__ = ["FAR", "Rows", "chosen_places", "gather", "moved", "places_of", "rows_of"]

FAR = torch.iinfo(torch.int32).max
"""Column of filler: past all others, so that columns stay ascending."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Tokens by owner (row * h + head) and place, which counts its real tokens from 0; no padding, no filler of parts.

    Attributes:
        columns: (b * h, n) int64 ascending; `FAR` past the owner's last token.
        address: (b * h, n) int64 slot of each token among all slots of all parts, lane after lane. Past the owner's
            last token it repeats that token's.
        counts: (b * h,) int64 tokens.
        on_host: the same on the CPU; None where the host does not know them. The most of them is n in any case.
    """

    columns: Tensor
    address: Tensor
    counts: Tensor
    on_host: Tensor | None = None

    def valid(self) -> Tensor:
        """(b * h, n) bool: there is a token."""
        return torch.arange(self.columns.shape[1], device=self.counts.device)[None] < self.counts[:, None]

    def pick(self, place: Tensor, here: Tensor, each: Tensor) -> Rows:
        """Only some of the tokens.

        Args:
            place: (b * h, k) int64 ascending where `here`.
            here: (b * h, k) bool: this entry of `place` counts.
            each: (b * h,) int64 on the CPU: how many do.
        """
        order = torch.argsort((~here).to(torch.uint8), dim=1, stable=True)
        counts = each if here.device.type == "cpu" else here.sum(1)
        order = order[:, : int(each.max()) if each.numel() else 0]
        place = place.gather(1, order).clamp(0, max(self.columns.shape[1] - 1, 0))
        last = (counts - 1).clamp(min=0)[:, None]
        filled = torch.arange(order.shape[1], device=place.device)[None] <= last
        place = torch.where(filled, place, place.gather(1, last.clamp(max=max(place.shape[1] - 1, 0))))
        picked = Rows(columns=self.columns.gather(1, place), address=self.address.gather(1, place), counts=counts)
        columns = picked.columns.masked_fill(~picked.valid(), FAR)
        return replace(picked, columns=columns, on_host=each)


def places_of(parts: Sequence[Segment], real: Tensor | None, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """The place of each slot among the real tokens of its owner.

    Args:
        parts: in time order.
        real: (b, columns) bool, False for padding; None where nothing is padded.
        device: of the answer.

    Returns:
        For each part (m, s) int64, -1 where no real token is; and (b * h,) int64 tokens of each owner.
    """
    before = torch.zeros(parts[0].layout.rows * parts[0].layout.heads, dtype=torch.int64, device=device)
    places = []
    for part in parts:
        layout = part.layout
        held = layout.filled(device)
        if real is not None:
            row = torch.div(layout.owners(device), layout.heads, rounding_mode="floor")[:, None]
            mine = real.to(device)[row, layout.columns(device).expand(layout.lanes, -1)]
            held = mine if held is None else held & mine
        if held is None and layout.owner is None:
            places.append(before[:, None] + torch.arange(layout.size, device=device))
            before = before + layout.size
            continue
        if held is None:
            held = torch.ones((layout.lanes, layout.size), dtype=torch.bool, device=device)
        owner, of_lane = layout.owners(device), held.sum(1)
        # The lanes of an owner follow each other: what its earlier lanes hold comes first.
        earlier = of_lane.cumsum(0) - of_lane
        first = earlier[torch.searchsorted(owner, owner)]
        place = (before[owner] + earlier - first)[:, None] + held.cumsum(1) - 1
        places.append(place.masked_fill(~held, -1))
        before = before.index_add(0, owner, of_lane)
    return places, before


def rows_of(parts: Sequence[Segment], real: Tensor | None, device: torch.device) -> Rows:
    """What each owner holds in these parts; arguments as for `places_of`."""
    if real is None and all(part.layout.owner is None and part.layout.lengths is None for part in parts):
        return _side_by_side(parts, device)
    places, counts = places_of(parts, real, device)
    known = torch.stack([part.layout.counts() for part in parts]).sum(0).flatten() if real is None else None
    longest = int((counts if known is None else known).max()) if counts.numel() else 0
    # One slot behind all takes what is no token: which slots those are is known to the device alone.
    end = counts.shape[0] * longest
    columns = torch.full((end + 1,), FAR, dtype=torch.int64, device=device)
    address = torch.zeros_like(columns)
    base = 0
    for part, place in zip(parts, places, strict=True):
        layout = part.layout
        slots = torch.arange(base, base + layout.lanes * layout.size, device=device).view(layout.lanes, layout.size)
        base += layout.lanes * layout.size
        at = (layout.owners(device)[:, None] * longest + place).masked_fill(place < 0, end).flatten()
        columns[at] = layout.columns(device).expand_as(place).flatten()
        address[at] = slots.flatten()
    columns, address = (
        each[:end].view(-1, longest) if longest else each[:0].view(len(counts), 0) for each in (columns, address)
    )
    rows = Rows(columns=columns, address=address, counts=counts, on_host=known)
    if longest:
        last = address.gather(1, (counts - 1).clamp(min=0)[:, None])
        rows = replace(rows, address=torch.where(rows.valid(), address, last))
    return rows


def _side_by_side(parts: Sequence[Segment], device: torch.device) -> Rows:
    """`rows_of` parts in which lane i is all of owner i's, and every slot is filled: they lie one behind the other."""
    owners = parts[0].layout.rows * parts[0].layout.heads
    columns, address, base = [], [], 0
    for part in parts:
        layout = part.layout
        columns.append(layout.columns(device).expand(owners, layout.size))
        address.append(torch.arange(base, base + owners * layout.size, device=device).view(owners, layout.size))
        base += owners * layout.size
    held = sum(part.layout.size for part in parts)
    on_host = torch.full((owners,), held, dtype=torch.int64)
    counts = on_host if device.type == "cpu" else torch.full((owners,), held, dtype=torch.int64, device=device)
    return Rows(columns=torch.cat(columns, 1), address=torch.cat(address, 1), counts=counts, on_host=on_host)


def gather(states: Sequence[Tensor], address: Tensor) -> Tensor:
    """States at some slots, a copy.

    Args:
        states: of each part, (m, s, d), any strides.
        address: (b * h, k) int64, see `Rows.address`.

    Returns:
        (b * h, k, d).
    """
    if len(states) == 1:
        slots = states[0].shape[1]
        return at_slots(states[0], (torch.div(address, slots, rounding_mode="floor"), address % slots))
    out = states[0].new_empty((*address.shape, states[0].shape[-1]))
    base = 0
    for part in states:
        lanes, slots = part.shape[:2]
        here = (address >= base) & (address < base + lanes * slots)
        if address.device.type != "cpu":
            # How many there are is known to the device alone.
            at = (address - base).clamp(0, lanes * slots - 1)
            states_here = part[torch.div(at, slots, rounding_mode="floor"), at % slots]
            out = torch.where(here[..., None], states_here, out)
            base += lanes * slots
            continue
        place = here.flatten().nonzero()[:, 0]
        at = address.flatten()[place] - base
        rows = at_slots(part, (torch.div(at, slots, rounding_mode="floor"), at % slots))
        out.view(-1, out.shape[-1]).index_copy_(0, place, rows)
        base += lanes * slots
    return out


def moved(parts: Sequence[Segment], address: Tensor, here: Tensor) -> list[tuple[Segment, Tensor]]:
    """The tokens at some slots as they are stored, of each part one lane for each owner. On the CPU.

    Args:
        parts: in time order; none shares what it stores among heads.
        address: (b * h, k) int64, see `Rows.address`, ascending.
        here: (b * h, k) bool: this entry counts. Those that do stand first.

    Returns:
        A segment for each part of which there is a token, and (b * h, s') int64 the entry that each of its slots is of.
    """
    found, base = [], 0
    for part in parts:
        layout, slots = part.layout, part.layout.lanes * part.layout.size
        mine = here & (address >= base) & (address < base + slots)
        counts = mine.sum(1)
        most = int(counts.max()) if counts.numel() else 0
        if most:
            # An owner's entries of this part follow one another: past them the last one is repeated.
            entry = torch.minimum(torch.arange(most)[None], (counts[:, None] - 1).clamp(min=0))
            entry = entry + mine.to(torch.uint8).argmax(1, keepdim=True)
            at = (address.gather(1, entry) - base).clamp(0, slots - 1)
            lane, slot = torch.div(at, layout.size, rounding_mode="floor"), at % layout.size
            columns = layout.columns(at.device).expand(layout.lanes, -1)[lane, slot]
            new = Layout(
                rows=layout.rows,
                heads=layout.heads,
                size=most,
                positions=columns.to(torch.int32),
                lengths=None if int(counts.min()) == most else counts.to(torch.int32),
            )
            found.append((part.regather(lane, slot, new), entry))
        base += slots
    return found


def chosen_places(keep: Tensor, each: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The places of a kept set.

    Args:
        keep: (b * h, n) bool.
        each: (b * h,) int64 on the CPU: how many each owner keeps; None: the host waits to learn it.

    Returns:
        (b * h, k) int64 places ascending, 0 where an owner has fewer; and (b * h, k) bool: this is one.
    """
    counts = keep.sum(1)
    if each is not None and keep.device.type != "cpu":
        # A stable sort by "not kept" lists each owner's places first, in order.
        most = max(1, int(each.max()))
        at = torch.argsort((~keep).to(torch.uint8), dim=1, stable=True)[:, :most]
        here = torch.arange(most, device=keep.device)[None] < counts[:, None]
        return at.masked_fill(~here, 0), here
    owner, place = keep.nonzero(as_tuple=True)
    most = max(1, int(counts.max()))
    at = torch.zeros((keep.shape[0], most), dtype=torch.int64, device=keep.device)
    at[owner, torch.arange(owner.shape[0], device=keep.device) - (counts.cumsum(0) - counts)[owner]] = place
    return at, torch.arange(at.shape[1], device=keep.device)[None] < counts[:, None]
