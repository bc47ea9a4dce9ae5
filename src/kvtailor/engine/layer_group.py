"""Layers whose tokens are encoded together: that they hold the same, and their segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.plan.registry import Codec
from kvtailor.types import Layout, PlainSegment, Segment
from kvtailor.types.checked_returns import checked_segment, refuse

__all__ = ["encoded", "joined"]


def encoded(
    parts: Sequence[PlainSegment], codec: Codec, first: Tensor | None, *, newest: int | None = None, seen: int = 0
) -> Sequence[Segment]:
    """The segments of a group of layers, see `Codec.layer_groups`.

    Args:
        parts: the same tokens of each layer.
        codec: of the last layer.
        first: see `Codec.encode`.
        newest, seen: see `Codec.encode_aged`; None of a codec to which the age of tokens is nothing.

    Raises:
        CacheMisuse: the layers hold different tokens.
        MethodError: the codec returns something else than a segment for each layer.
    """
    _check(parts)
    found: Sequence[Segment]
    if codec.ages and newest is not None:
        found = [
            codec.encode_aged(part.layout, part.keys, part.values, first, newest=newest, seen=seen) for part in parts
        ]
    else:
        found = codec.encode_group(parts[-1].layout, [(part.keys, part.values) for part in parts], first)
    if len(found) != len(parts):
        raise refuse(codec, f"returned {len(found)} segments for {len(parts)} layers")
    for part, segment in zip(parts, found, strict=True):
        checked_segment(codec, segment, codec.segment_type(), part.layout)
    return found


def joined(held: Sequence[Sequence[Segment]], codec: Codec, first: Tensor | None = None) -> list[list[Segment]]:
    """Return the segments of a group of layers that share again, once the same has been done to each of them.

    What waited for the whole group is encoded.

    Args:
        held: the segments of each layer.
        codec, first: see `encoded`.

    Raises:
        CacheMisuse, MethodError: see `encoded`.
    """
    found: list[list[Segment]] = [[] for _ in held]
    for parts in zip(*held, strict=True):
        waiting = [part for part in parts if isinstance(part, PlainSegment)]
        if not waiting:
            _check(parts)
        for own, segment in zip(found, encoded(waiting, codec, first) if waiting else codec.joined(parts), strict=True):
            own.append(segment)
    return found


def _check(parts: Sequence[Segment]) -> None:
    for other in parts[:-1]:
        if not _same_tokens(parts[-1].layout, other.layout):
            raise CacheMisuse(
                "layers whose tokens are encoded together hold different tokens, and so cannot share a segment; use "
                "another codec, or a new cache"
            )


def _same_tokens(one: Layout, other: Layout) -> bool:
    if (one.start, one.size, one.lanes) != (other.start, other.size, other.lanes):
        return False
    for mine, its in ((one.positions, other.positions), (one.owner, other.owner), (one.lengths, other.lengths)):
        if (mine is None) != (its is None) or (mine is not None and its is not None and not torch.equal(mine, its)):
            return False
    return True
