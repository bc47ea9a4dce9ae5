"""Saving one layer as fields and tensors, and restoring it, also with other heads.

`state_of` describes a layer and `restore` makes it again; each part of the layer does its own share. `regroup` makes a
layer whose kv heads come from several saved ones, for a cache on another number of processes. Codes are moved and never
encoded again. Heads keep what they held; parts that covered other heads become segments of their own, which the next
eviction joins.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine.state import Clock, LayerState, Observed, whole_number
from kvtailor.errors import CacheMisuse
from kvtailor.ops.segments.coded import under
from kvtailor.ops.segments.stored_parts import check_layout, check_segment
from kvtailor.plan import Plan
from kvtailor.store.recent_window import Tail
from kvtailor.types import Layout, PlainSegment, Segment
from kvtailor.types.evidence import Evidence

__all__ = ["HeadsOf", "regroup", "restore", "state_of"]


def state_of(state: LayerState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return JSON-able fields and tensors from which `restore` makes a layer again.

    Raises:
        CacheMisuse: the layer is between a recorded forward and its crop.
    """
    if state.pending is not None:
        raise CacheMisuse("a cache cannot be saved between a recorded forward and its crop")
    fields: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for own, kept in (
        state.stored.state(state.here()),
        state.clock.state(),
        state.model.state(),
        state.observed.state(),
    ):
        fields |= own
        tensors |= kept
    if state.stored.tail is not None:
        fields["held"] = int(state.counts().sum())
    # What a reader compares before the layer is taken for what it was.
    fields["tensors"] = {
        name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in sorted(tensors.items())
    }
    return fields, tensors


def restore(
    state: LayerState,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    plan: Plan,
    kv_heads: int,
    dtype: torch.dtype | None,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Restore a layer from what `state_of` described.

    Args:
        state: of the layer; it is reset first.
        fields, tensors: what `state_of` returned.
        plan: of the cache.
        kv_heads: h, of the model.
        dtype: of the cache; None: the layer holds nothing yet.
        sizes: channels of the keys and values that the layer holds; None: not known.

    Raises:
        ValueError: a number, a layout or a segment is invalid, or saving the layer again would not give these fields
            and tensors.
        LookupError, TypeError, RuntimeError: something is missing, or has another type.
    """
    state.reset()
    state.clock = Clock.from_state(fields)
    state.model.take_state(fields)
    state.stored.seen = seen = whole_number(fields, "seen")
    if "tail" not in fields:
        _check_again(state, fields, tensors)
        return
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"a layer holds tokens, and its dtype is said to be {dtype}")
    rows, heads = fields["rows"], fields["heads"]
    if heads != kv_heads:
        raise ValueError(f"a layer has {heads} kv heads, and the model {kv_heads}")
    state.stored.tail = _tail(rows, heads, fields["tail"], under("tail.", tensors), seen, dtype, sizes)
    for i, saved in enumerate(fields["segments"]):
        mine = under(f"segment.{i}.", tensors)
        own = under("layout.", mine)
        layout = Layout(rows=rows, heads=heads, size=saved["layout"]["size"], start=saved["layout"]["start"], **own)
        check_layout(layout, seen)
        state.codec(plan)
        segment = state.restored(saved["codec"], layout, saved["fields"], mine)
        if segment.codec != saved["codec"]:
            raise ValueError(f"a segment is said to be of {saved['codec']}, and the plan makes {segment.codec}")
        check_segment(segment, dtype, sizes)
        state.stored.segments.append(segment)
    state.rejoin()
    state.observed = Observed.from_state(fields, tensors)
    _check_clock(state, plan)
    _check_observed(state, dtype)
    _check_again(state, fields, tensors)


def _check_again(state: LayerState, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise if saving the restored layer would not give the same parts: some are left over, or missing."""
    own, kept = state_of(state)
    here, there = ({name: (t.dtype, tuple(t.shape)) for name, t in each.items()} for each in (kept, tensors))
    if here != there:
        odd = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        raise ValueError(f"its fields describe other tensors than there are: {', '.join(odd[:3])}")
    own = json.loads(json.dumps(own))
    # Files of earlier versions lack some fields.
    odd = sorted(name for name in fields if name not in own or own[name] != fields[name])
    if set(odd) - {"dtype", "states"}:
        raise ValueError(f"its fields are not those of the layer that they make: {', '.join(odd[:3])}")


def _check_clock(state: LayerState, plan: Plan) -> None:
    """Raise if a layer's clock does not fit its tokens and its plan."""
    clock, seen = state.clock, state.stored.seen
    slack = plan.slack_tokens
    early = max(clock.settled_seen, clock.prompt, clock.growth) <= seen
    as_planned = clock.evict_at is None or (clock.evict_at == slack and clock.growth == seen - clock.settled_seen)
    if not early or not as_planned:
        raise ValueError(
            f"a layer that saw {seen} tokens has a clock of {clock.settled_seen}, {clock.growth} and {clock.prompt}, "
            f"and its next eviction after {clock.evict_at}"
        )


def _check_observed(state: LayerState, dtype: torch.dtype) -> None:
    """Raise if what a layer remembers does not have its rows, heads, parts or dtype."""
    evidence = state.observed.evidence
    sizes = [(each.layout.lanes, each.layout.size) for each in state.parts()]
    if len(evidence.mass) > len(sizes):
        raise ValueError(f"a layer has {len(sizes)} parts, and the attention of {len(evidence.mass)} is remembered")
    for mass, part in zip(evidence.mass, sizes, strict=False):
        _check_shape("attention", mass, torch.float32, part)
    count = _check_queries(evidence, state.rows, state.heads, dtype)
    _check_moments(evidence, state.rows, count)
    _check_scores(state.observed, state.rows, state.heads, dtype)
    for name, carried in state.observed.carry.items():
        if carried.ndim < 1 or carried.shape[0] != state.rows:
            raise ValueError(f"{name} is carried for {tuple(carried.shape)}, and there are {state.rows} rows")


def _check_queries(evidence: Evidence, rows: int, heads: int, dtype: torch.dtype) -> int:
    """Check queries and their columns, and return the number of their heads; 0: none are remembered."""
    queries, sampled = evidence.queries, evidence.sampled
    of_queries = (queries, sampled, evidence.moments_mean)
    q_heads = {each.shape[1] for each in of_queries if each is not None and each.ndim > 1}
    if len(q_heads) > 1 or any(count % heads for count in q_heads):
        raise ValueError(f"queries of {sorted(q_heads)} heads are remembered for {heads} kv heads")
    count = next(iter(q_heads), 0)
    for name, states, columns in (
        ("queries", queries, evidence.columns),
        ("sampled queries", sampled, evidence.sampled_columns),
    ):
        if (states is None) != (columns is None):
            raise ValueError(f"{name} are remembered without their columns, or these without them")
        if states is not None and columns is not None:
            size = states.shape[-1] if states.ndim else 0
            _check_shape(name, states, dtype, (rows, count, columns.shape[-1] if columns.ndim else 0, size))
            _check_shape(
                f"columns of {name}", columns, torch.int64, (*([rows] if columns.ndim > 1 else []), columns.shape[-1])
            )
    return count


def _check_moments(evidence: Evidence, rows: int, count: int) -> None:
    """Check the moments of queries of `count` heads: all of them are there, or none."""
    moments = (evidence.moments_count, evidence.moments_mean, evidence.moments_spread)
    if any(each is None for each in moments) != all(each is None for each in moments):
        raise ValueError("the moments of queries are not all there")
    for name, moment, dimensions in zip(("count", "mean", "spread"), moments, (1, 3, 4), strict=True):
        if moment is not None:
            size = moment.shape[-1] if moment.ndim else 0
            _check_shape(f"{name} of queries", moment, torch.float32, (rows, count, size, size)[:dimensions])


def _check_scores(observed: Observed, rows: int, heads: int, dtype: torch.dtype) -> None:
    """Check what scorers remember of each row and kv head, and that scores and their columns fit."""
    for name, memory in observed.memories().items():
        known = (torch.int32, torch.int64) if name == "scored_columns" else (torch.float32, dtype)
        if memory.dtype not in known or tuple(memory.shape[:2]) != (rows, heads):
            raise ValueError(
                f"{name} are {memory.dtype} of shape {tuple(memory.shape)}, of {rows} rows and {heads} heads"
            )
    scored, columns = observed.scored, observed.scored_columns
    if (scored is None) != (columns is None) or (
        scored is not None and columns is not None and scored.shape[-1] != columns.shape[-1]
    ):
        raise ValueError("scores are remembered of other tokens than their columns")


def _check_shape(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"the {name} are {tensor.dtype} of shape {tuple(tensor.shape)} and not {dtype} of {shape}")


def _tail(
    rows: int,
    heads: int,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    seen: int,
    dtype: torch.dtype,
    sizes: tuple[int, int] | None,
) -> Tail:
    whole_number(fields, "length")
    if any(tensor.ndim < 2 for tensor in tensors.values()) or bool(tensors) > {"keys", "values"}.issubset(tensors):
        raise ValueError(f"a tail has {', '.join(f'{name} {tuple(t.shape)}' for name, t in tensors.items())}")
    tail = Tail.from_state(rows, heads, fields, tensors)
    slots = {tensor.shape[1] for tensor in tensors.values()}
    if slots - {tail.length} or bool(tail.length) > bool(slots):
        raise ValueError(f"a tail is said to hold {tail.length} tokens, and has {sorted(slots)} slots")
    if tail.length:
        held = tail.as_segment()
        check_layout(held.layout, seen)
        check_segment(held, dtype, sizes)
    tail.look(seen)
    return tail


_FAR = torch.iinfo(torch.int32).max


@dataclass(frozen=True, kw_only=True)
class HeadsOf:
    """Some adjacent kv heads of a layer.

    Attributes:
        state: of the layer.
        first: the first of these heads.
        count: how many they are.
    """

    state: LayerState
    first: int
    count: int

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return (b, count * g, ...) of these heads, or of their query heads, from (b, heads * g, ...)."""
        each = tensor.shape[1] // self.state.heads
        return tensor[:, self.first * each : (self.first + self.count) * each]


def regroup(target: LayerState, pieces: Sequence[HeadsOf], plan: Plan) -> None:
    """Fill an empty layer with the heads of others, in order.

    Args:
        target: of the layer, with what belongs to the model.
        pieces: of the same layer, in the order of their heads; they have seen the same tokens.
        plan: of the cache.

    Raises:
        ValueError: the pieces do not fit together, or a codec cannot split or join these heads.
    """
    first = pieces[0].state
    for piece in pieces[1:]:
        state = piece.state
        if (state.stored.seen, state.rows, state.clock) != (first.stored.seen, first.rows, first.clock):
            raise ValueError("parts of a layer differ in their rows, or in what they have seen")
    target.reset()
    target.stored.seen, target.clock = first.stored.seen, copy.copy(first.clock)
    target.model.scaling = first.model.scaling
    if first.stored.tail is None:
        return
    rows, heads = first.rows, sum(piece.count for piece in pieces)
    length = _common_tail(pieces)
    target.stored.tail = Tail(rows, heads)
    # The codec of this layer is made for its number of heads, which the tail tells.
    target.codec(plan)
    parts = [_parts(piece, length) for piece in pieces]
    newest: list[tuple[PlainSegment, Tensor | None]] = []
    for *_, (segment, mass) in parts:
        assert isinstance(segment, PlainSegment)
        newest.append((segment, mass))
    older: list[tuple[Segment, Tensor | None]] = []
    for at, segment, mass in _joined([own[:-1] for own in parts], pieces):
        layout = segment.layout.among(heads, at, next(iter(segment.tensors().values())).device)
        fields, tensors = segment.state()
        older.append((target.restored(segment.codec, layout, fields, tensors), mass))
    target.stored.segments = [segment for segment, _ in older]
    masses = [mass for _, mass in older]
    if length:
        target.stored.tail.replace(_side_by_side([segment for segment, _ in newest], rows, heads))
        tails = [mass for _, mass in newest]
        if all(mass is not None for mass in tails):
            masses.append(_by_rows([mass for mass in tails if mass is not None], rows))
    target.observed.evidence = _evidence(pieces, [mass for mass in masses if mass is not None])
    _remember(target, pieces, plan)
    target.rejoin()


def _joined(
    parts: Sequence[Sequence[tuple[Segment, Tensor | None]]], pieces: Sequence[HeadsOf]
) -> Iterator[tuple[int, Segment, Tensor | None]]:
    """Return the segments of all pieces in time order, each with the number of its first head and its mass.

    Args:
        parts: of each piece, in time order.
        pieces: the pieces.

    Raises:
        ValueError: heads share what is stored, so that these pieces cannot be split or joined.
    """
    for k in range(max(len(own) for own in parts)):
        # (first head here, group of heads in the model, part) of each piece that has a k-th part.
        found: list[tuple[int, int, tuple[Segment, Tensor | None]]] = []
        at = 0
        for own, piece in zip(parts, pieces, strict=True):
            if k < len(own):
                state = piece.state
                head = state.model.share.first(state.heads) + piece.first
                found.append((at, head // own[k][0].sharing, own[k]))
            at += piece.count
        for _, same in itertools.groupby(found, key=lambda each: each[1]):
            (first, _, (segment, mass)), *others = same
            joined = segment.beside([other for _, _, (other, _) in others]) if others else None
            if joined is not None:
                yield first, joined, None
                continue
            yield first, segment, mass
            for first, _, (segment, mass) in others:
                yield first, segment, mass


def _parts(piece: HeadsOf, length: int) -> list[tuple[Segment, Tensor | None]]:
    """Return the parts of a piece in time order, with their mass; the newest `length` tokens are the last part."""
    state, heads = piece.state, slice(piece.first, piece.first + piece.count)
    segments = list(state.here())
    masses: list[Tensor | None] = [*state.observed.evidence.mass]
    masses += [None] * (len(segments) + 1 - len(masses))
    found: list[tuple[Segment, Tensor | None]] = []
    for segment, mass in zip(segments, masses, strict=False):
        kept = segment.of_heads(piece.first, piece.count)
        # Of a part that other heads alone have lanes in, nothing is left.
        if kept.layout.lanes:
            found.append((kept, None if mass is None else _mass_of(segment.layout, mass, heads)))
    tail = state.stored.tail
    assert tail is not None
    if not tail.length:
        return [*found, (_nothing(state, piece.count), None)]
    whole = tail.as_segment().of_heads(piece.first, piece.count)
    assert isinstance(whole, PlainSegment)
    mass = masses[len(segments)]
    mass = None if mass is None else _mass_of(tail.as_segment().layout, mass, heads)
    if tail.length > length:
        cut = tail.length - length
        found.append((_slots(whole, slice(0, cut)), None if mass is None else mass[:, :cut]))
        whole, mass = _slots(whole, slice(cut, None)), None if mass is None else mass[:, cut:]
    return [*found, (whole, mass)]


def _common_tail(pieces: Sequence[HeadsOf]) -> int:
    """Return how many of the newest columns are in the tails of all pieces, without a gap, in all heads."""
    shortest = min(0 if piece.state.stored.tail is None else piece.state.stored.tail.length for piece in pieces)
    seen, common = pieces[0].state.stored.seen, shortest
    layouts = [piece.state.stored.tail.as_segment().layout for piece in pieces if shortest and piece.state.stored.tail]
    if len({layout.start for layout in layouts}) == 1 and layouts[0].start is not None:
        return shortest if len({layout.size for layout in layouts}) == 1 else min(layout.size for layout in layouts)
    if len(pieces) == 1:
        return shortest
    for layout in layouts:
        # (lanes, shortest): which of the newest slots hold the column that they would hold without any gap.
        columns = layout.columns(torch.device("cpu"))[:, layout.size - shortest :]
        whole = (columns == torch.arange(seen - shortest, seen)).all(0)
        common = min(common, int(whole.flip(0).to(torch.int64).cumprod(0).sum()))
    return common


def _slots(segment: PlainSegment, slots: slice) -> PlainSegment:
    """Return adjacent slots of all lanes."""
    layout = segment.layout
    keys, values = segment.keys[:, slots].clone(), segment.values[:, slots].clone()
    start = None if layout.start is None else layout.start + (slots.start or 0)
    positions = None if layout.positions is None else layout.positions[:, slots].clone()
    return PlainSegment(
        layout=replace(layout, size=keys.shape[1], start=start, positions=positions), keys=keys, values=values
    )


def _nothing(state: LayerState, heads: int) -> PlainSegment:
    empty = torch.zeros((state.rows * heads, 0, 1), dtype=torch.float32)
    return PlainSegment(layout=Layout(rows=state.rows, heads=heads, size=0, start=0), keys=empty, values=empty)


def _side_by_side(segments: Sequence[PlainSegment], rows: int, heads: int) -> PlainSegment:
    """Join segments of different heads, which hold the same number of tokens for each head."""
    layouts = [segment.layout for segment in segments]
    start = layouts[0].start if len({layout.start for layout in layouts}) == 1 else None
    positions = None
    if start is None:
        device = segments[0].keys.device
        columns = [layout.columns(device).expand(layout.lanes, -1).to(torch.int32) for layout in layouts]
        positions = _by_rows(columns, rows)
    layout = Layout(rows=rows, heads=heads, size=layouts[0].size, start=start, positions=positions)
    return PlainSegment(
        layout=layout,
        keys=_by_rows([segment.keys for segment in segments], rows),
        values=_by_rows([segment.values for segment in segments], rows),
    )


def _by_rows(pieces: Sequence[Tensor], rows: int) -> Tensor:
    """Return (b * h, ...) from (b * h_1, ...), (b * h_2, ...), ...: the heads of each row are adjacent."""
    return torch.cat([piece.unflatten(0, (rows, -1)) for piece in pieces], 1).flatten(0, 1).contiguous()


def _mass_of(layout: Layout, mass: Tensor, heads: slice) -> Tensor:
    """Return the mass (m', s) of some heads from that of all lanes (m, s)."""
    head = layout.owners(mass.device) % layout.heads
    return mass[(head >= heads.start) & (head < heads.stop)].clone()


def _evidence(pieces: Sequence[HeadsOf], mass: Sequence[Tensor]) -> Evidence:
    found = pieces[0].state.observed.evidence
    joined: dict[str, Any] = {}
    for name in ("queries", "sampled", "moments_mean", "moments_spread"):
        if getattr(found, name) is not None:
            joined[name] = torch.cat(
                [piece.tensor(getattr(piece.state.observed.evidence, name)) for piece in pieces], 1
            )
    return replace(found, mass=tuple(mass), **joined)


def _remember(target: LayerState, pieces: Sequence[HeadsOf], plan: Plan) -> None:
    """Copy what earlier evictions, the reconstruction and the attention have left."""
    observed = target.observed
    for name, filler in (("scored", 0.0), ("scored_columns", _FAR), ("reconstruction", 0.0)):
        tensors = [getattr(piece.state.observed, name) for piece in pieces]
        if all(tensor is not None for tensor in tensors):
            setattr(observed, name, _padded(pieces, tensors, filler))
    carries = [piece.state.observed.carry for piece in pieces]
    carried = {}
    for name, kind in plan.attend.carry_of.items():
        if all(name in carry for carry in carries):
            tensors = [carry[name] for carry in carries]
            filler = 0.0 if tensors[0].is_floating_point() else -1
            carried[name] = tensors[0] if kind == "row" else _padded(pieces, tensors, filler)
    observed.carry = carried
    # What is left out is made anew at the end of the next forward.
    target.clock.reindex = any(carry.keys() - carried.keys() for carry in carries)


def _padded(pieces: Sequence[HeadsOf], tensors: Sequence[Tensor], filler: float) -> Tensor:
    """Return (b, h, ..., k) from (b, h_1, ..., k_1), (b, h_2, ..., k_2), ...; shorter ones are padded."""
    longest = max(tensor.shape[-1] for tensor in tensors)
    wide = []
    for piece, tensor in zip(pieces, tensors, strict=True):
        own = piece.tensor(tensor)
        short = [*own.shape[:-1], longest - own.shape[-1]]
        wide.append(torch.cat([own, own.new_full(short, filler)], -1))
    return torch.cat(wide, 1)
