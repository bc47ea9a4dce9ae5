"""Lanes of several kv heads side by side: the channels of a group's heads become those of one wide head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtailor.types import Layout
from kvtailor.types.late_checks import send

__all__ = ["apart", "group_layout", "hold_the_same", "members", "side_by_side", "together"]


def members(layout: Layout, joined: int) -> Tensor | None:
    """(m / joined, joined) int64 on the CPU: the lanes of each group, in the order of rows, groups and pages.

    None where the heads of a group have not the same number of lanes.
    """
    cpu = torch.device("cpu")
    if layout.owner is None:
        found = torch.arange(layout.lanes).view(-1, joined)
    else:
        owner = layout.owners(cpu)
        # The number of a lane among its owner's, as in `ops.lanes.ragged`.
        page = torch.arange(layout.lanes) - torch.searchsorted(owner, owner)
        group, member = torch.div(owner, joined, rounding_mode="floor"), owner % joined
        # One number to sort lanes by (group, page, member): page is below lanes + 1, member below joined. Heads that
        # stand side by side then follow each other, page by page.
        place = (group * (layout.lanes + 1) + page) * joined + member
        if layout.lanes % joined:
            return None
        found = place.argsort().view(-1, joined)
        # A group is whole where its `joined` places agree on (group, page) and are the members 0, 1, ... in order.
        ordered = place[found]
        whole = torch.div(ordered, joined, rounding_mode="floor")
        if not bool((whole == whole[:, :1]).all() and (ordered % joined == torch.arange(joined)).all()):
            return None
    return found


def hold_the_same(layout: Layout, lanes: Tensor | None) -> bool:
    """Whether the `members` hold the same columns, slot by slot."""
    if lanes is None:
        return False
    known = [each for each in (layout.positions, layout.lengths) if each is not None]
    rows = [each[send(lanes, each.device)] for each in known]
    return all(bool((each == each[:, :1]).all()) for each in rows)


def group_layout(layout: Layout, lanes: Tensor) -> Layout:
    """The layout of the groups, of which `lanes` (m', joined) are the members."""
    joined = lanes.shape[1]
    take = lambda x: None if x is None else x[send(lanes[:, 0], x.device)]  # noqa: E731
    owner = None if layout.owner is None else torch.div(layout.owner, joined, rounding_mode="floor")
    return replace(
        layout,
        heads=layout.heads // joined,
        positions=take(layout.positions),
        lengths=take(layout.lengths),
        owner=take(owner),
    )


def side_by_side(layouts: Sequence[Layout]) -> tuple[Layout, Tensor]:
    """The layout of all heads of several that hold the same slots of the same rows.

    Returns:
        The layout, and (m,) int64 on the CPU: which of their lanes, in the order of the layouts, each lane is.
    """
    cpu, first = torch.device("cpu"), layouts[0]
    heads, at, owners = sum(layout.heads for layout in layouts), 0, []
    for layout in layouts:
        owners.append(layout.owners_among(heads, at, cpu))
        at += layout.heads
    owner, order = torch.cat(owners).sort(stable=True)
    put = lambda each: None if each[0] is None else torch.cat(each)[order.to(each[0].device)]  # noqa: E731
    return replace(
        first,
        heads=heads,
        positions=put([layout.positions for layout in layouts]),
        lengths=put([layout.lengths for layout in layouts]),
        owner=None if first.owner is None else owner.to(first.owner.device),
    ), order


def together(states: Tensor, lanes: Tensor) -> Tensor:
    """States (m, s, c) as (m', s, joined * c)."""
    # (m', joined, s, c) -> (m', s, joined, c) -> (m', s, joined * c).
    return states[send(lanes, states.device)].transpose(1, 2).flatten(2)


def apart(wide: Tensor, lanes: Tensor) -> Tensor:
    """What `together` was given."""
    joined = lanes.shape[1]
    pieces = wide.unflatten(2, (joined, -1)).transpose(1, 2)
    out = wide.new_empty((lanes.numel(), wide.shape[1], pieces.shape[-1]))
    out[send(lanes, wide.device)] = pieces
    return out
