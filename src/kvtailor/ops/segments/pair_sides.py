"""What one layer of a pair keeps of its own, of its keys or of its values, beside what the pair shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.segments.coded import alone

__all__ = ["Merged", "Side", "Unmerged", "side_of"]


class Side(ABC):
    """One side of one layer. Immutable; a subclass is a frozen dataclass whose fields are tensors."""

    @abstractmethod
    def restore(self, directions: Tensor) -> Tensor:
        """States (m, s, c) from the directions (m, s, c) that the pair shares."""

    @abstractmethod
    def moved(self, lane: Tensor, slot: Tensor) -> Side:
        """Of the tokens at these lanes and slots, (m', s') int64 each."""

    @abstractmethod
    def of_pair(self, lower: Any) -> Side:
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
class Merged(Side):
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
    def of(cls, states: Tensor, magnitudes: Tensor, places: Tensor) -> Merged:
        """Of states (m, s, c) and the magnitudes that `slerp.split` gave."""
        whole = states.flatten(0, 1)[places.to(torch.int64)]
        return cls(magnitudes=magnitudes.to(states.dtype), places=places, whole=whole)

    def restore(self, directions: Tensor) -> Tensor:
        states = directions * self.magnitudes
        states.flatten(0, 1)[self.places.to(torch.int64)] = self.whole
        return states

    def moved(self, lane: Tensor, slot: Tensor) -> Merged:
        slots = self.magnitudes.shape[1]
        which = torch.full((self.magnitudes.shape[0] * slots,), -1, dtype=torch.int64, device=lane.device)
        which[self.places.to(torch.int64)] = torch.arange(self.places.shape[0], device=lane.device)
        found = which[lane * slots + slot].flatten()
        places = (found >= 0).nonzero().flatten()
        magnitudes = self.magnitudes[lane, slot]
        return Merged(magnitudes=magnitudes, places=places.to(torch.int32), whole=self.whole[found[places]])

    def of_pair(self, lower: Merged) -> Merged:
        return replace(self, places=lower.places)

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return (lanes * slots + self.places.shape[0] * self.whole.shape[-1]) * self.whole.element_size()

    def shared_bytes(self) -> int:
        return 4 * self.places.shape[0]


@dataclass(frozen=True, kw_only=True)
class Unmerged(Side):
    """States (m, s, c) as they are; there are no directions of them."""

    states: Tensor

    @classmethod
    def of(cls, states: Tensor) -> Unmerged:
        """In a storage of their own."""
        return cls(states=alone(states))

    def restore(self, directions: Tensor) -> Tensor:
        return self.states

    def moved(self, lane: Tensor, slot: Tensor) -> Unmerged:
        return Unmerged(states=self.states[lane, slot])

    def of_pair(self, lower: Unmerged) -> Unmerged:
        return self

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return lanes * slots * self.states.shape[-1] * self.states.element_size()

    def shared_bytes(self) -> int:
        return 0


def side_of(tensors: Mapping[str, Tensor]) -> Side:
    """The side whose `tensors()` these are."""
    return Unmerged(**tensors) if "states" in tensors else Merged(**tensors)
