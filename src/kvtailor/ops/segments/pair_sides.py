"""Two layers of a pair: what one keeps of its own, of its keys or its values, beside the directions that both share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.segments.code_layout import CodeLayout, TokenMagnitudes
from kvtailor.ops.segments.coded import Coded, Whole, alone
from kvtailor.types import Layout, Segment

__all__ = ["HalfSegment", "Magnified", "MergedSide", "PairSide", "Unmerged", "side_of"]


class PairSide(ABC):
    """One side of one layer. Immutable; a subclass is a frozen dataclass whose fields are tensors."""

    @abstractmethod
    def restore(self, directions: Tensor) -> Tensor:
        """States (m, s, c) from the directions (m, s, c) that the pair shares."""

    @abstractmethod
    def as_read(self, directions: Coded) -> Coded:
        """The states as they are stored, from the directions as they are."""

    @abstractmethod
    def check(self, lanes: int, slots: int) -> None:
        """Raise where the tensors, which may come from a file, are not those of so many lanes and slots.

        Raises:
            ValueError: a clause without a full stop.
        """

    @abstractmethod
    def moved(self, lane: Tensor, slot: Tensor) -> PairSide:
        """Of the tokens at these lanes and slots, (m', s') int64 each."""

    @abstractmethod
    def of_pair(self, lower: Any) -> PairSide:
        """The same, on the tensors that the lower layer has of the same side, where they are shared."""

    @abstractmethod
    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        """Bytes of what is its own, from counts and element sizes."""

    @abstractmethod
    def shared_bytes(self) -> int:
        """Bytes of what `of_pair` shares, which the lower layer counts."""

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class MergedSide(PairSide):
    """Magnitudes, and the tokens that were not merged.

    Attributes:
        magnitudes: (m, s, 1) of the cache's dtype.
        places: (r,) int32 ascending: lane * s + slot of tokens that were not merged; the same for the layers of a pair.
        whole: (r, c) the vectors of these tokens.
    """

    magnitudes: Tensor
    places: Tensor
    whole: Tensor

    @classmethod
    def of(cls, states: Tensor, magnitudes: Tensor, places: Tensor) -> MergedSide:
        """Of states (m, s, c) and the magnitudes that `slerp.split` gave."""
        whole = states.flatten(0, 1)[places.to(torch.int64)]
        return cls(magnitudes=magnitudes.to(states.dtype), places=places, whole=whole)

    def restore(self, directions: Tensor) -> Tensor:
        states = directions * self.magnitudes
        states.flatten(0, 1)[self.places.to(torch.int64)] = self.whole
        return states

    def as_read(self, directions: Coded) -> Coded:
        return Magnified(directions=directions, own=self)

    def check(self, lanes: int, slots: int) -> None:
        places, whole = self.places, self.whole
        if tuple(self.magnitudes.shape) != (lanes, slots, 1) or self.magnitudes.dtype != whole.dtype:
            raise ValueError(
                f"magnitudes are {self.magnitudes.dtype} of shape {tuple(self.magnitudes.shape)}, and there are "
                f"{lanes} lanes of {slots} slots of {whole.dtype}"
            )
        if places.dtype != torch.int32 or places.ndim != 1 or whole.ndim != 2 or whole.shape[0] != places.shape[0]:
            raise ValueError(f"{tuple(whole.shape)} whole tokens are at {tuple(places.shape)} places of {places.dtype}")
        ends = places[:1], places[-1:]
        if bool((places.diff() <= 0).any() | (ends[0] < 0).any() | (ends[1] >= lanes * slots).any()):
            raise ValueError(f"the places of whole tokens do not ascend from 0 to below {lanes * slots}")

    def moved(self, lane: Tensor, slot: Tensor) -> MergedSide:
        slots = self.magnitudes.shape[1]
        which = torch.full((self.magnitudes.shape[0] * slots,), -1, dtype=torch.int64, device=lane.device)
        which[self.places.to(torch.int64)] = torch.arange(self.places.shape[0], device=lane.device)
        found = which[lane * slots + slot].flatten()
        places = (found >= 0).nonzero().flatten()
        magnitudes = self.magnitudes[lane, slot]
        return MergedSide(magnitudes=magnitudes, places=places.to(torch.int32), whole=self.whole[found[places]])

    def of_pair(self, lower: MergedSide) -> MergedSide:
        return replace(self, places=lower.places)

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return (lanes * slots + self.places.shape[0] * self.whole.shape[-1]) * self.whole.element_size()

    def shared_bytes(self) -> int:
        return 4 * self.places.shape[0]


@dataclass(frozen=True, kw_only=True)
class Unmerged(PairSide):
    """States (m, s, c) as they are; there are no directions of them."""

    states: Tensor

    @classmethod
    def of(cls, states: Tensor) -> Unmerged:
        """In a storage of their own."""
        return cls(states=alone(states))

    def restore(self, directions: Tensor) -> Tensor:
        return self.states

    def as_read(self, directions: Coded) -> Coded:
        return Whole(states=self.states)

    def check(self, lanes: int, slots: int) -> None:
        if self.states.ndim != 3 or tuple(self.states.shape[:2]) != (lanes, slots):
            raise ValueError(f"states have shape {tuple(self.states.shape)}, and there are {lanes} lanes of {slots}")

    def moved(self, lane: Tensor, slot: Tensor) -> Unmerged:
        return Unmerged(states=self.states[lane, slot])

    def of_pair(self, lower: Unmerged) -> Unmerged:
        return self

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return lanes * slots * self.states.shape[-1] * self.states.element_size()

    def shared_bytes(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class Magnified(Coded):
    """A `MergedSide` side as it is read: directions in any encoding, times magnitudes, and the tokens that are whole.

    It is made to be read, of tensors that a segment holds.
    """

    directions: Coded
    own: MergedSide
    of_tokens = ()

    @cached_property
    def code_layout(self) -> CodeLayout | None:
        directions = self.directions.code_layout
        if directions is None or directions.magnitudes is not None:
            return None
        own = TokenMagnitudes(magnitudes=self.own.magnitudes, places=self.own.places, whole=self.own.whole)
        return directions._replace(magnitudes=own)

    def decode(self) -> Tensor:
        return self.own.restore(self.directions.decode())

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return self.directions.closed_form_bytes(lanes, slots) + self.own.closed_form_bytes(lanes, slots)


@dataclass(frozen=True, kw_only=True)
class HalfSegment(Segment):
    """One layer's half of a pair.

    Attributes:
        layout: which tokens these are.
        shared: the directions, which both layers hold.
        keys, values: what this layer has of its own.
    """

    layout: Layout
    shared: Segment
    keys: PairSide
    values: PairSide


def side_of(tensors: Mapping[str, Tensor]) -> PairSide:
    """The side whose `tensors()` these are."""
    return Unmerged(**tensors) if "states" in tensors else MergedSide(**tensors)
