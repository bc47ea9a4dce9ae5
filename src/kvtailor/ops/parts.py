"""Attention over segments: chooses the fast form for what is held, the number of new tokens and the dtype.

Many queries on one uniform part go through `ops.prompt`; everything else is lanes (`ops.lanes`, `ops.folded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.folded import folded, suits
from kvtailor.ops.lanes import Lanes, joint
from kvtailor.ops.prompt import causal, masked, query_blocks, with_mass
from kvtailor.types import Layout, Segment, Visibility

__all__ = ["Read", "counting", "lane_sees", "read_all", "read_lanes"]

# From this many new tokens on, a part is read by torch's own kernel, whose tiles are then filled.
_PROMPT = 64


@dataclass(frozen=True, kw_only=True)
class Read:
    """Attention over everything that was read.

    Attributes:
        output: (b, q, t, dv) in the query's dtype, zeros where a query sees nothing.
        lse: (b, q, t) float32; None for a prompt on one part.
        mass: for each part (m, s) float32; None where no weight was given.
    """

    output: Tensor
    lse: Tensor | None = None
    mass: list[Tensor] | None = None


def read_all(
    query: Tensor, parts: Sequence[Segment], visible: Visibility, scaling: float, weight: Tensor | None = None
) -> Read:
    """Attention of the new tokens over every slot of every part, on the cache's dtype with a float32 softmax.

    Args:
        query: (b, q, t, d), any dtype.
        parts: in time order; the last t slots of the last part are the new tokens themselves.
        visible: what each query may see.
        scaling: factor before the softmax.
        weight: (b, t) float32: how much each query counts for the mass, see `counting`; None: no mass.
    """
    layout = parts[-1].layout
    plain = len(parts) == 1 and layout.owner is None and layout.lengths is None
    if plain and query.shape[2] >= _PROMPT and (weight is not None or visible.causal_only or layout.start is not None):
        return _prompt(query, parts[0], visible, scaling, weight)
    return _few(query, parts, visible, scaling, weight)


def counting(query: Tensor, want_mass: bool, real_queries: Tensor | None) -> Tensor | None:
    """(b, t) float32: how much each query counts for the mass; None where no mass is wanted."""
    if not want_mass:
        return None
    if real_queries is None:
        return torch.ones((query.shape[0], query.shape[2]), device=query.device)
    return real_queries.to(device=query.device, dtype=torch.float32)


def _prompt(query: Tensor, part: Segment, visible: Visibility, scaling: float, weight: Tensor | None) -> Read:
    b, _, t, _ = query.shape
    layout, device = part.layout, query.device
    h, n = layout.heads, layout.size
    keys, values = (states.unflatten(0, (b, h)) for states in part.decode())
    cast = query.to(keys.dtype)
    columns = layout.columns(device)

    def sees(first: int, end: int) -> Tensor:
        if visible.causal_only:
            return torch.ones((1, end - first, n), dtype=torch.bool, device=device).tril(n - t + first)
        return visible.at(torch.arange(b, device=device), columns, first, end).expand(-1, end - first, n)

    def row_sees(row: int, first: int, end: int) -> Tensor:
        mine = columns if layout.start is not None else columns[row * h : (row + 1) * h]
        rows = torch.full((mine.shape[0],), row, device=device)
        return visible.at(rows, mine, first, end).expand(-1, end - first, n)

    if weight is not None:
        rule = None if visible.causal_only else row_sees
        output, mass = with_mass(cast, keys, values, scaling, weight, rule)
        return Read(output=output.to(query.dtype), mass=[mass.flatten(0, 1)])
    if visible.causal_only and n == t:
        return Read(output=causal(cast, keys, values, scaling).to(query.dtype))
    return Read(output=masked(cast, keys, values, scaling, sees).to(query.dtype))


def _few(query: Tensor, parts: Sequence[Segment], visible: Visibility, scaling: float, weight: Tensor | None) -> Read:
    b, q, t, _ = query.shape
    h, device = parts[-1].layout.heads, query.device
    states = [part.decode() for part in parts]
    slots = sum(part.layout.lanes * part.layout.size for part in parts)
    outputs, lses = [], []
    mass = None if weight is None else [torch.zeros(s[0].shape[:2], device=device) for s in states]
    for first, end in query_blocks(t, slots * (q // h), most=t):
        lanes = []
        for part, (keys, values) in zip(parts, states, strict=True):
            own, newest = part.layout.owner, part is parts[-1]
            mask = lane_sees(part.layout, visible, first, end, newest=newest, device=device)
            if newest and visible.causal_only and own is None:
                # The new tokens close the last part, so its slots past these queries are still to come.
                reach = part.layout.size - t + end
                keys, values = keys[:, :reach], values[:, :reach]
                mask = None if mask is None else mask[..., :reach]
            owner = None if own is None else own.to(device)
            lanes.append(Lanes(keys=keys, values=values, owner=owner, visible=mask))
        read = read_lanes(query[:, :, first:end], h, lanes, scaling, None if weight is None else weight[:, first:end])
        assert read.lse is not None
        outputs.append(read.output)
        lses.append(read.lse)
        if mass is not None and read.mass is not None:
            for total, now in zip(mass, read.mass, strict=True):
                total[:, : now.shape[1]] += now
    if len(outputs) == 1:
        return Read(output=outputs[0], lse=lses[0], mass=mass)
    return Read(output=torch.cat(outputs, 2), lse=torch.cat(lses, 2), mass=mass)


def read_lanes(query: Tensor, heads: int, lanes: Sequence[Lanes], scaling: float, weight: Tensor | None = None) -> Read:
    """Attention over lanes that are at hand.

    Args:
        query: (b, q, t, d), any dtype.
        heads: h.
        lanes: all of one dtype.
        scaling, weight: see `read_all`.
    """
    b, q, t, d = query.shape
    grouped = query.reshape(b * heads, q // heads, t, d).to(lanes[0].keys.dtype)
    if weight is None and suits(grouped, lanes[0].keys, lanes[0].values):
        out, lse, mass = *folded(grouped, lanes, scaling), None
    else:
        counts = None if weight is None else weight.repeat_interleave(heads, 0)
        out, lse, mass = joint(grouped, lanes, scaling, weight=counts)
    return Read(output=out.to(query.dtype).reshape(b, q, t, -1), lse=lse.reshape(b, q, t), mass=mass)


def lane_sees(
    layout: Layout, visible: Visibility, first: int, end: int, *, newest: bool, device: torch.device
) -> Tensor | None:
    """Which slots of a part the queries first..end see, bool that broadcasts to (m, t', s); None where all see all."""
    filled = layout.filled(device)
    mask = None if filled is None else filled[:, None]
    if visible.causal_only and (not newest or visible.new_tokens == 1):
        return mask
    rows = torch.div(layout.owners(device), layout.heads, rounding_mode="floor")
    sees = visible.at(rows, layout.columns(device), first, end)
    return sees if mask is None else sees & mask
