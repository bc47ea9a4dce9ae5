"""What a network of this folder reads of a token: the key of its own kv head, turned back, and its value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Held, Needs

__all__ = ["ReadsOwnToken", "own_token"]


class ReadsOwnToken(CalibratedMethod):
    """Scores by trained tensors of each kv head, which read a token alone. Stands before `Scorer` among the bases.

    Attributes:
        recent: newest tokens that always stay. A field of the scorer.
        sinks: first tokens of each row that always score highest. A field of the scorer.
        without: what is said where no tensors were given.
    """

    recent: int
    sinks: int
    without: ClassVar[str]

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True)

    @property
    def reads(self) -> tuple[str, ...]:
        """Which tensors of the file these arguments need."""
        return self.per_head

    @abstractmethod
    def scores_of(self, held: Held, made: Mapping[str, Tensor], head: int) -> Tensor:
        """(b, n) float32 from 0 to 1 of one kv head, by the tensors `made` of all heads of its layer."""

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 from 0 to 1; from 2 on for the sinks.

        Raises:
            ValueError: no tensors or no rotation were given.
        """
        if held.calibration is None or not set(self.reads) <= set(held.calibration):
            raise ValueError(self.without)
        made = {name: held.calibration[name].to(held.keys.device, torch.float32) for name in self.reads}
        scores = torch.stack([self.scores_of(held, made, head) for head in range(held.keys.shape[1])], 1)
        age = held.positions - held.first[:, None, None]
        return torch.where(age < self.sinks, (2 + self.sinks - age).float(), scores)

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """See `example_for`."""
        return cls.example_for(layers=layers, heads=heads, group=group, size=size, value_size=size, generator=generator)


def own_token(held: Held, head: int) -> Tensor:
    """(b, n, d + dv) float32 of one kv head: keys as they were before their rotation, then values.

    Both are linear in the hidden state that the layer's attention got, and neither depends on where the token stands.

    Raises:
        ValueError: no rotation was gathered.
    """
    if held.rotation is None:
        raise ValueError("a network reads keys before their rotation, but none was gathered; Needs(rotation=True)")
    ages = held.positions[:, head] - held.first[:, None]
    keys = turn(held.keys[:, head].float(), -ages, held.rotation)
    return torch.cat([keys, held.values[:, head].float()], -1)
