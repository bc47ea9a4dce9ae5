"""Rolling: positions count what is held, not what was seen.

*Idea*: a model knows only distances that it was trained on. Where the middle of a text is dropped, the rest closes up:
each held key stands at its place among the held ones, so that no distance is longer than the cache, however long the
text was.

*Paper*: StreamingLLM, "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.2.

*Source*: the paper and a description of its repository (MIT).

*Departs*: the paper keeps keys without their rotation and turns all of them at every step. Here they stay stored as the
model turned them, and only the difference is turned: a key by as many positions as tokens are missing between it and
the newest. Distances are the same, and the newest tokens, between which nothing is missing, are not touched. In 16 bits
a turned key is rounded once more; and the model still turns new states by their true positions in float32, whose
rounding grows with the text (0.001 radians after 16 thousand tokens, 0.06 after a million). Any kept set will do.

*Cost*: at each forward one turn, and a copy, of the held keys that are older than the last gap: of the sinks alone for
sinks and the recent window, of most of the cache for other kept sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.attend.contract import (
    READS_ALL,
    Attended,
    Attention,
    AttentionRequest,
    CarryRequest,
    FastPathReading,
    FlopsRequest,
    IndexRequest,
)
from kvtailor.errors import CacheMisuse
from kvtailor.method import Serves
from kvtailor.ops.attention.parts import counting, read_all
from kvtailor.ops.lanes.rotate import turn
from kvtailor.ops.lanes.rows import places_of
from kvtailor.types import Layout, PlainSegment, Rotation, Segment, Visibility

__all__ = ["Rolling"]

_SHORT = 16
"""Tokens of a first part up to which its turned keys are kept beside it."""


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A part whose keys are turned in some of its lanes (of a ragged part) or in its first slots (of any other)."""

    part: Segment
    lanes: Tensor | None
    slots: int
    pieces: int


@dataclass(frozen=True, kw_only=True)
class Rolling(Attention):
    """Reads every held token, at the distance that it has inside the cache."""

    gives_mass: ClassVar[bool] = True
    needs_rotation: ClassVar[bool] = True
    in_cache_positions: ClassVar[bool] = True
    serves: ClassVar[Serves] = Serves(
        latents="it turns whole keys by their positions, and of a latent layer's keys only the last channels are turned"
    )

    def read_on_fast_path(self, layer: int, parts: Sequence[Segment]) -> FastPathReading:
        """All as it lies while nothing is missing; then all but the first part, whose turned keys `index` has left."""
        newest = parts[-1].layout
        whole = newest.start is not None and _in_one_run(parts, newest.start + newest.size)
        return FastPathReading(carried=not whole)

    def index(self, request: IndexRequest) -> Mapping[str, Tensor]:
        """Turn the keys of the first part, where that is short and nothing is missing behind any other.

        Between two evictions as many tokens are seen as are held, so that what is missing stays the same number.
        """
        parts, visible, rotation = request.parts, request.visible, request.context.rotation
        if len(parts) < 2 or visible.real is not None or rotation is None:
            return {}
        first, layout = parts[0], parts[0].layout
        if layout.size > _SHORT or layout.owner is not None or layout.lengths is not None:
            return {}
        keys, values = first.decode()
        if not keys.is_cpu:
            # Elsewhere there is no fast path, and to look would be to wait.
            return {}
        (gap, reach), *others = _gaps(parts, visible, keys.device)
        if gap is None or reach < layout.size or any(each for _, each in others):
            return {}
        shape = (layout.rows, layout.heads, layout.size, -1)
        return {
            "first_keys": turn(keys, gap, rotation).contiguous().view(shape),
            "first_values": values.clone(memory_format=torch.contiguous_format).view(shape),
        }

    def carried_bytes(self, request: CarryRequest) -> tuple[int, int]:
        """See `Attention.carried_bytes`: nothing, or keys and values of a first part of `_SHORT` tokens at most.

        Values are taken to be as wide as keys, or narrower.
        """
        states = 2 * request.rows * request.heads * min(_SHORT, request.longest) * request.size
        return 0, states * request.element_size

    def prompt_pass(self) -> str:
        """See `Attention.prompt_pass`."""
        return READS_ALL

    def attend(self, request: AttentionRequest) -> Attended:
        """See `Attention.attend`.

        Raises:
            CacheMisuse: tokens are missing, and the layer's rotation was not given.
        """
        query, parts, visible = request.query, request.parts, request.visible
        rolled: list[Segment] = []
        splits = []
        for part, gap in zip(parts, _gaps(parts, visible, query.device), strict=True):
            pieces, split = _turned(part, *gap, request.context.rotation)
            rolled += pieces
            splits.append(split)
        counts = counting(query, request.want_mass, request.real_queries)
        read = read_all(query, rolled, visible, request.scaling, counts, request.softmax)
        mass = None if read.mass is None else _joined(splits, read.mass)
        return Attended(output=read.output, lse=read.lse, mass=mass, carry=request.context.carry)

    def flops(self, request: FlopsRequest) -> None:
        """Not known: which keys are turned depends on where the gaps are."""
        return None


def _gaps(parts: Sequence[Segment], visible: Visibility, device: torch.device) -> list[tuple[Tensor | None, int]]:
    """For each part (m, s) int64: tokens of the row that were seen after each slot's own and are not held any more.

    None where nothing is missing after any of them. Padding is neither held nor missing. With it so many of the first
    slots that nothing is missing after the others, in all lanes; where the host knows of a run of newest tokens, which
    may be longer than it knows, it does not wait for a better number.
    """
    real = visible.real
    seen = visible.first_column + visible.new_tokens
    if real is None and _in_one_run(parts, seen):
        return [(None, 0)] * len(parts)
    places, counts = places_of(parts, real, device)
    ages = None if real is None else real[:, :seen].to(device).cumsum(1) - 1
    gaps: list[Tensor] = []
    reaches: list[Tensor | int] = []
    for part, place in zip(parts, places, strict=True):
        owner = part.layout.owners(device)
        age = part.layout.columns(device).expand_as(place)
        total = torch.full_like(counts, seen)
        if ages is not None:
            row = torch.div(owner, part.layout.heads, rounding_mode="floor")[:, None]
            age = ages[row, age]
            total = (ages[:, -1] + 1).repeat_interleave(part.layout.heads)
        gap = ((total - counts)[owner][:, None] - (age - place)).masked_fill(place < 0, 0)
        gaps.append(gap)
        layout = part.layout
        run = layout.run if part is parts[-1] and layout.owner is None and layout.lengths is None else None
        if run is not None:
            reaches.append(layout.size - min(run, layout.size))
            continue
        # The last slot with a gap in any lane; 0 where there is none.
        reaches.append(((gap != 0).any(0) * torch.arange(1, layout.size + 1, device=device)).max())
    unknown = [each for each in reaches if isinstance(each, Tensor)]
    read = iter(torch.stack(unknown).tolist() if unknown else ())
    known = [next(read) if isinstance(each, Tensor) else each for each in reaches]
    return [(gap if reach else None, reach) for gap, reach in zip(gaps, known, strict=True)]


def _in_one_run(parts: Sequence[Segment], seen: int) -> bool:
    """Whether the parts plainly hold all columns from some column on, the same for all."""
    column = parts[0].layout.start
    for part in parts:
        layout = part.layout
        if column is None or layout.start != column or layout.lengths is not None or layout.owner is not None:
            return False
        column += layout.size
    return column == seen


def _turned(part: Segment, gap: Tensor | None, reach: int, rotation: Rotation | None) -> tuple[list[Segment], _Split]:
    """The part in pieces that attention reads in its place, of which the first has keys of its own.

    Args:
        part: in time order behind the parts before.
        gap, reach: see `_gaps`.
        rotation: of the layer.
    """
    if gap is None:
        return [part], _Split(part=part, lanes=None, slots=0, pieces=1)
    if rotation is None:
        raise CacheMisuse(
            "rolling turns keys to their places in the cache, and was not told the layer's rotary embedding; make the "
            "cache with kvtailor.cache_for"
        )
    keys, values = part.decode()
    layout = part.layout
    if layout.owner is not None or layout.lengths is not None:
        touched = (gap != 0).any(1)
        lanes, rest = touched.nonzero()[:, 0], (~touched).nonzero()[:, 0]
        turned = turn(keys[lanes], gap[lanes], rotation)
        pieces: list[Segment] = [PlainSegment(layout=_lanes(layout, lanes), keys=turned, values=values[lanes])]
        if rest.numel():
            pieces.append(PlainSegment(layout=_lanes(layout, rest), keys=keys[rest], values=values[rest]))
        return pieces, _Split(part=part, lanes=torch.cat([lanes, rest]), slots=0, pieces=len(pieces))
    # What is missing grows towards the oldest tokens, so it is the first slots that are turned.
    turned = turn(keys[:, :reach], gap[:, :reach], rotation)
    pieces = [PlainSegment(layout=_slots(layout, 0, reach), keys=turned, values=values[:, :reach])]
    if reach < layout.size:
        rest_layout = _slots(layout, reach, layout.size)
        pieces.append(PlainSegment(layout=rest_layout, keys=keys[:, reach:], values=values[:, reach:]))
    return pieces, _Split(part=part, lanes=None, slots=reach, pieces=len(pieces))


def _lanes(layout: Layout, lanes: Tensor) -> Layout:
    """Some lanes of a layout, in order."""
    take = lambda x: None if x is None else x[lanes.to(x.device)]  # noqa: E731
    owner = layout.owners(lanes.device)[lanes]
    return replace(layout, owner=owner, positions=take(layout.positions), lengths=take(layout.lengths))


def _slots(layout: Layout, first: int, end: int) -> Layout:
    """The slots first..end of a layout in which all are filled."""
    start = None if layout.start is None else layout.start + first
    positions = None if layout.positions is None else layout.positions[:, first:end]
    return replace(layout, size=end - first, start=start, positions=positions)


def _joined(splits: Sequence[_Split], mass: Sequence[Tensor]) -> list[Tensor]:
    """The mass of each part from that of its pieces."""
    left, found = list(mass), []
    for split in splits:
        mine, left = left[: split.pieces], left[split.pieces :]
        if split.lanes is None:
            found.append(torch.cat(mine, 1))
        else:
            whole = torch.cat(mine, 0)
            found.append(torch.empty_like(whole).index_copy_(0, split.lanes, whole))
    return found
