"""Attention over segments: chooses the fast form for what is held, the number of new tokens and the dtype.

Many queries on one uniform part go through `ops.attention.prompt`; few queries read each part as it is stored where
`ops.dispatch` has a form for it; everything else is decoded lanes (`ops.attention.lanes`, `ops.attention.folded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.ops.attention.folded import folded, suits
from kvtailor.ops.attention.lanes import Lanes, joint
from kvtailor.ops.attention.prompt import causal, masked, query_blocks, with_mass
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole
from kvtailor.ops.segments.sides import StoredSides, stored_sides
from kvtailor.types import PLAIN_SOFTMAX, Layout, Segment, SegmentView, Softmax, Visibility

__all__ = ["Read", "counting", "lane_sees", "lanes_of", "read_all", "read_lanes", "rule_sees"]

# From this many new tokens on, a part is read by torch's own kernel, whose tiles are then filled.
_PROMPT = 64


@dataclass(frozen=True, kw_only=True)
class Read:
    """Attention over everything that was read.

    Attributes:
        output: (b, q, t, dv) in the query's dtype, zeros where a query sees nothing.
        lse: (b, q, t) float32 over what each query sees and its sink; None for a prompt on one part.
        mass: for each part (m, s) float32; None where no weight was given.
    """

    output: Tensor
    lse: Tensor | None = None
    mass: list[Tensor] | None = None


def read_all(
    query: Tensor,
    parts: Sequence[Segment],
    visible: Visibility,
    scaling: float,
    weight: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Read:
    """Attention of the new tokens over every slot of every part, with a float32 softmax.

    Computed in the wider dtype of query and cache: a query in float32 is not rounded for keys of 16 bits.

    Args:
        query: (b, q, t, d), any dtype.
        parts: in time order; the last t slots of the last part are the new tokens themselves.
        visible: what each query may see.
        scaling: factor before the softmax.
        weight: (b, t) float32: how much each query counts for the mass, see `counting`; None: no mass.
        softmax: what the softmax has besides the factor.
    """
    layout = parts[-1].layout
    in_blocks = dispatch.reads_in_blocks(query) and not all(part.plain for part in parts)
    if in_blocks or query.shape[2] <= dispatch.MOST_QUERIES:
        blocks = []
        for first, end in query_blocks(query.shape[2], 1, most=dispatch.MOST_QUERIES):
            block = _as_stored(query, parts, visible, scaling, weight, softmax, first, end)
            if block is None:
                break
            blocks.append(block)
        else:
            return _behind_one_another(blocks)
    # torch's own kernel reads one part with one mask for all heads; lanes with owners, free slots, weights or lifts
    # need more than that.
    readings = [part.view() for part in parts]
    plain = len(parts) == 1 and layout.owner is None and layout.lengths is None and readings[0].plain
    if plain and query.shape[2] >= _PROMPT and (weight is not None or visible.causal_only or layout.start is not None):
        return _prompt(query, layout, readings[0], visible, scaling, weight, softmax)
    return _few(query, [part.layout for part in parts], readings, visible, scaling, weight, softmax)


def _behind_one_another(blocks: Sequence[Read]) -> Read:
    """What blocks of queries found, one behind the other."""
    if len(blocks) == 1:
        return blocks[0]
    masses = [block.mass for block in blocks if block.mass is not None]
    return Read(
        output=torch.cat([block.output for block in blocks], 2),
        lse=torch.cat([block.lse for block in blocks if block.lse is not None], 2),
        mass=[torch.stack(of_part).sum(0) for of_part in zip(*masses, strict=True)] if masses else None,
    )


def counting(query: Tensor, want_mass: bool, real_queries: Tensor | None) -> Tensor | None:
    """(b, t) float32: how much each query counts for the mass; None where no mass is wanted."""
    if not want_mass:
        return None
    if real_queries is None:
        return torch.ones((query.shape[0], query.shape[2]), device=query.device, dtype=torch.float32)
    return real_queries.to(device=query.device, dtype=torch.float32)


def _prompt(
    query: Tensor,
    layout: Layout,
    reading: SegmentView,
    visible: Visibility,
    scaling: float,
    weight: Tensor | None,
    softmax: Softmax,
) -> Read:
    b, _, t, _ = query.shape
    device = query.device
    h, n = layout.heads, layout.size
    keys, values = (states.unflatten(0, (b, h)) for states in (reading.keys, reading.values))
    # torch's kernels want one dtype; what is held is widened for as long as the call takes.
    wide = torch.promote_types(query.dtype, keys.dtype)
    cast, keys, values = query.to(wide), keys.to(wide), values.to(wide)
    columns = layout.columns(device)

    def sees(first: int, end: int) -> Tensor:
        return visible.at(torch.arange(b, device=device), columns, first, end).expand(-1, end - first, n)

    def row_sees(row: int, first: int, end: int) -> Tensor:
        # (1, n) where all lanes hold the same columns, else those of the row's kv heads, (h, n).
        mine = columns if layout.start is not None else columns[row * h : (row + 1) * h]
        rows = torch.full((mine.shape[0],), row, device=device)
        return visible.at(rows, mine, first, end).expand(-1, end - first, n)

    if weight is not None:
        rule = None if visible.causal_only else row_sees
        output, mass = with_mass(cast, keys, values, scaling, weight, rule, softmax)
        return Read(output=output.to(query.dtype), mass=[mass.flatten(0, 1)])
    if visible.causal_only:
        return Read(output=causal(cast, keys, values, scaling, softmax).to(query.dtype))
    return Read(output=masked(cast, keys, values, scaling, sees, softmax).to(query.dtype))


def _as_stored(
    query: Tensor,
    parts: Sequence[Segment],
    visible: Visibility,
    scaling: float,
    weight: Tensor | None,
    softmax: Softmax,
    first: int,
    end: int,
) -> Read | None:
    """Attention of queries first..end that decodes only what nothing reads as it is stored; None where all are that.

    With a weight, None as well where a part cannot be read by what gives its mass; and where these are not all queries
    and a part is decoded for them, since that is better done once.
    """
    once = end - first == query.shape[2]
    query = query if once else query[:, :, first:end]
    b, q, t, d = query.shape
    h, device = parts[-1].layout.heads, query.device
    grouped, keeps, caps = query.reshape(b * h, q // h, t, d), weight is not None, softmax.softcap is not None
    # Asked of every part before anything is computed: where no part can be read as it is stored, all are decoded
    # together, and one softmax goes over them.
    asked = [_asked(grouped, part, mass=keeps, caps=caps) for part in parts]
    kernels = [
        None if own is None else dispatch.coded_attention(each, own.keys, own.values, mass=keeps, **own.changing)
        for own, each in asked
    ]
    if not any(kernels):
        return None
    if not once and (None in kernels or any(own is not None and own.turning and own.keys_in for own, _ in asked)):
        return None
    jointly = dispatch.joint_attention(device)
    found, kept, rest, together = [], [], [], []
    for part, (own, mine), attend in zip(parts, asked, kernels, strict=True):
        layout, reading = part.layout, None
        if attend is None and own is not None and not own.as_they_are:
            # Queries and sums go to where the codes are, so that no token has to be brought back.
            numbers = own.in_numbers()
            attend = dispatch.coded_attention(mine, numbers.keys, numbers.values, mass=keeps, **own.changing)
            own = own if attend is None else numbers
        if attend is None:
            own, mine, reading = None, grouped, part.view()
            # Decoded states are read by the kernels as well, unless several kv heads share a lane of values, or keys
            # lie in two places.
            if reading.shared is None and reading.more_keys is None:
                own = StoredSides(layout=layout, keys=Whole(states=reading.keys), values=Whole(states=reading.values))
                attend = dispatch.coded_attention(grouped, own.keys, own.values, mass=keeps)
            if attend is None:
                if keeps:
                    return None
                mask = lane_sees(layout, visible, first, end, newest=part is parts[-1], device=device)
                rest.append(lanes_of(layout, reading, mask))
                continue
        assert own is not None
        layout = own.layout
        inputs = AttentionInputs(
            mine,
            own.keys,
            own.values,
            scaling=scaling,
            softcap=softmax.softcap,
            owner=None if layout.owner is None else layout.owner.to(device),
            lengths=None if layout.lengths is None else layout.lengths.to(device),
            visible=rule_sees(layout, visible, first, end, newest=part is parts[-1], device=device),
            log_weight=own.log_weight if reading is None else reading.log_weight,
            turned=own.turned,
            offset=None if own.offsetting is None else (own.offsetting, grouped),
        )
        # Several parts in one launch; what has to be applied to one part's sums lets that part go alone.
        unlifted = own.as_they_are and (reading is None or reading.lift is None)
        if unlifted and jointly is not None and attend is jointly.attend_coded:
            together.append(jointly.LanesRead(inputs=inputs))
            continue
        out, lse, *weights = attend(inputs)
        shift = own.logit_shift(grouped, scaling)
        if not own.as_they_are:
            out, lse = own.map_output(out, lse, grouped, shift, dispatch.maps_of(grouped)[1])
        if reading is not None and reading.lift is not None:
            # The kernel gave normalised sums (n, g, t, r), whose weights add up to 1, or to 0 where nothing is seen.
            seen = (lse > -torch.inf).to(out.dtype).flatten(1)
            out = reading.lift.of_sums(out.flatten(1, 2), seen).unflatten(1, (q // h, t))
        found.append((out, lse))
        kept += [(each, shift) for each in weights]
    if together:
        found.append(jointly.attend_parts(together))
    if rest:
        found.append(joint(grouped, rest, scaling, softmax=softmax)[:2])
    # The sinks are one part more, which is no part's own.
    out, lse = dispatch.merged(found, softmax.sink_rows(b, h))
    if weight is None:
        return _by_heads(query, out, lse)
    # Each part kept its weights relative to what it saw itself; only the log-sum-exp over all parts makes them shares.
    counts = weight[:, first:end].repeat_interleave(h, 0)
    return _by_heads(
        query, out, lse, [each.mass(lse if shift is None else lse - shift, counts) for each, shift in kept]
    )


def _asked(query: Tensor, part: Segment, *, mass: bool, caps: bool) -> tuple[StoredSides | None, Tensor]:
    """A part as it is stored, with the queries (n, g, t, d) for it; None where something stands against reading it so.

    Caps know nothing of what is added to all logits of a part. And the mass is that of the lanes that are stored, of
    which heads that share them have no shares.
    """
    own = stored_sides(part)
    if own is None or own.as_they_are:
        return own, query
    if own.turning is not None and not dispatch.turns_keys(query):
        return None, query
    if (own.shifts_logits and caps) or (own.joined > 1 and mass):
        return None, query
    return own, own.map_query(query, dispatch.maps_of(query)[0])


def _few(
    query: Tensor,
    layouts: Sequence[Layout],
    readings: Sequence[SegmentView],
    visible: Visibility,
    scaling: float,
    weight: Tensor | None,
    softmax: Softmax,
) -> Read:
    b, q, t, _ = query.shape
    h, device = layouts[-1].heads, query.device
    slots = sum(layout.lanes * layout.size for layout in layouts)
    outputs, lses = [], []
    mass = (
        None
        if weight is None
        else [torch.zeros(reading.keys.shape[:2], device=device, dtype=torch.float32) for reading in readings]
    )
    for first, end in query_blocks(t, slots * (q // h), most=t):
        lanes = []
        for index, (layout, reading) in enumerate(zip(layouts, readings, strict=True)):
            newest = index == len(layouts) - 1
            mask = lane_sees(layout, visible, first, end, newest=newest, device=device)
            # The new tokens close the last part, so its slots past these queries are still to come.
            # Pages of ragged heads end at different columns, so there nothing can be cut off.
            cut = newest and visible.causal_only and layout.owner is None
            lanes.append(lanes_of(layout, reading, mask, layout.size - t + end if cut else layout.size))
        counts = None if weight is None else weight[:, first:end]
        read = read_lanes(query[:, :, first:end], h, lanes, scaling, counts, softmax=softmax)
        assert read.lse is not None
        outputs.append(read.output)
        lses.append(read.lse)
        if mass is not None and read.mass is not None:
            for total, now in zip(mass, read.mass, strict=True):
                total[:, : now.shape[1]] += now
    if len(outputs) == 1:
        return Read(output=outputs[0], lse=lses[0], mass=mass)
    return Read(output=torch.cat(outputs, 2), lse=torch.cat(lses, 2), mass=mass)


def lanes_of(layout: Layout, reading: SegmentView, visible: Tensor | None, slots: int | None = None) -> Lanes:
    """One part as lanes.

    Args:
        layout: of the part.
        reading: of the part.
        visible: see `Lanes`.
        slots: the first slots that are read; None: all.
    """
    keys, log_weight, more = reading.keys[:, :slots], reading.log_weight, reading.more_keys
    return Lanes(
        keys=keys,
        values=reading.values[:, :slots],
        owner=None if layout.owner is None else layout.owner.to(keys.device),
        visible=None if visible is None else visible[..., :slots],
        log_weight=None if log_weight is None else log_weight[:, :slots],
        lift=reading.lift,
        shared=reading.shared,
        more_keys=None if more is None else more[:, :slots],
    )


def read_lanes(
    query: Tensor,
    heads: int,
    lanes: Sequence[Lanes],
    scaling: float,
    weight: Tensor | None = None,
    found: Sequence[tuple[Tensor, Tensor]] = (),
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Read:
    """Attention over lanes that are at hand.

    Args:
        query: (b, q, t, d), any dtype.
        heads: h.
        lanes: all of one dtype.
        scaling, weight: see `read_all`.
        found: out (b * h, g, t, dv) and lse (b * h, g, t) of what was read otherwise, where no weight is given; capped,
            and without the sinks.
        softmax: what the softmax has besides the factor.
    """
    b, q, t, d = query.shape
    sinks = softmax.sink_rows(b, heads)
    if not lanes:
        return _by_heads(query, *dispatch.merged(found, sinks))
    grouped = query.reshape(b * heads, q // heads, t, d)
    if weight is None and all(part.lift is None and part.shared is None and part.more_keys is None for part in lanes):
        sides = [(Whole(states=part.keys), Whole(states=part.values)) for part in lanes]
        chosen = [dispatch.coded_attention(grouped, *each) for each in sides]
        kernels = [attend for attend in chosen if attend is not None]
        if len(kernels) == len(lanes):
            stored = [
                attend(
                    AttentionInputs(
                        grouped,
                        *each,
                        scaling=scaling,
                        softcap=softmax.softcap,
                        owner=p.owner,
                        visible=p.visible,
                        log_weight=p.log_weight,
                    )
                )
                for p, each, attend in zip(lanes, sides, kernels, strict=True)
            ]
            return _by_heads(query, *dispatch.merged([*found, *stored], sinks))
    # The fused kernel gives no probabilities, so that with a weight everything goes through `joint`.
    fused = [part for part in lanes if weight is None and suits(grouped, part, softmax)]
    if fused or found:
        rest = [part for part in lanes if not suits(grouped, part, softmax)]
        each = [*found, *([folded(grouped, fused, scaling)] if fused else [])]
        if rest:
            each.append(joint(grouped, rest, scaling, softmax=softmax)[:2])
        out, lse, mass = *dispatch.merged(each, sinks), None
    else:
        counts = None if weight is None else weight.repeat_interleave(heads, 0)
        out, lse, mass = joint(grouped, lanes, scaling, weight=counts, softmax=softmax, sinks=sinks)
    return _by_heads(query, out, lse, mass)


def _by_heads(query: Tensor, out: Tensor, lse: Tensor, mass: list[Tensor] | None = None) -> Read:
    """What was found for (n, g, t), as it is given for the query (b, q, t, d)."""
    shape = query.shape[:3]
    return Read(output=out.to(query.dtype).reshape(*shape, -1), lse=lse.reshape(shape), mass=mass)


def lane_sees(
    layout: Layout, visible: Visibility, first: int, end: int, *, newest: bool, device: torch.device
) -> Tensor | None:
    """Which slots of a part the queries first..end see, bool that broadcasts to (m, t', s); None where all see all."""
    filled = layout.filled(device)
    mask = None if filled is None else filled[:, None]
    sees = rule_sees(layout, visible, first, end, newest=newest, device=device)
    if sees is None or mask is None:
        return mask if sees is None else sees
    return sees & mask


def rule_sees(
    layout: Layout, visible: Visibility, first: int, end: int, *, newest: bool, device: torch.device
) -> Tensor | None:
    """Return which slots the queries see as `lane_sees` does, but of filled slots alone: others may be among them."""
    if visible.causal_only and (not newest or visible.new_tokens == 1):
        return None
    rows = torch.div(layout.owners(device), layout.heads, rounding_mode="floor")
    return visible.at(rows, layout.columns(device), first, end)
