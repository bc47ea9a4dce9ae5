"""Held tokens side by side: the members of each lane moved to its front and cut into runs of one length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packed", "pack"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Where the members of lanes (..., n) stand once they are cut into runs, counted from a lane's first member.

    Attributes:
        member: (..., n) bool.
        place: (..., n) int64: a member's place among those of its lane; runs * size for all others.
        runs: r, how many runs a lane of n members has.
        size: c, places of a run. The last run of a lane may be filled in part, and runs behind it not at all.
    """

    member: Tensor
    place: Tensor
    runs: int
    size: int

    def in_runs(self, numbers: Tensor, filler: float = 0.0) -> Tensor:
        """(..., r, c) in the dtype of `numbers` (..., n); `filler` where no member is."""
        whole = numbers.new_full((*numbers.shape[:-1], self.runs * self.size + 1), filler)
        packed: Tensor = whole.scatter(-1, self.place, numbers)[..., :-1].unflatten(-1, (self.runs, self.size))
        return packed

    def states_in_runs(self, states: Tensor) -> Tensor:
        """(..., r, c, d) from states (..., n, d); zeros where no member is."""
        whole = states.new_zeros((*states.shape[:-2], self.runs * self.size + 1, states.shape[-1]))
        whole = whole.scatter(-2, self.place[..., None].expand_as(states), states)
        packed: Tensor = whole[..., :-1, :].unflatten(-2, (self.runs, self.size))
        return packed

    def filled(self) -> Tensor:
        """(..., r, c) bool: a member stands there."""
        count = self.member.sum(-1)[..., None, None]
        places = torch.arange(self.runs * self.size, device=self.place.device).view(self.runs, self.size)
        return places < count

    def back(self, in_runs: Tensor) -> Tensor:
        """(..., n) from (..., r, c); 0 for what is no member."""
        last = self.runs * self.size - 1
        return in_runs.flatten(-2).gather(-1, self.place.clamp_max(last)).masked_fill(~self.member, 0)


def pack(member: Tensor, size: int) -> Packed:
    """Cut the members of each lane into runs.

    Args:
        member: (..., n) bool, n >= 1.
        size: c, members of a run.
    """
    runs = -(-member.shape[-1] // size)
    place = (member.cumsum(-1) - 1).masked_fill(~member, runs * size)
    return Packed(member=member, place=place, runs=runs, size=size)
