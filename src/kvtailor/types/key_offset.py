"""The constant part of a layer's keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvtailor.types.evidence import Rotation

__all__ = ["KeyOffset"]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyOffset:
    """What a layer adds to each key of a head, whatever the token is: a bias of its key projection.

    Attributes:
        vectors: (h, d) float32, as it is at position 0. It belongs to the model, and is no cache's.
        rotation: by which it is turned at other positions; None: it is the same at all of them.
    """

    vectors: Tensor
    rotation: Rotation | None = None

    def of_heads(self, first: int, count: int) -> KeyOffset:
        """Return that of `count` kv heads from the head `first` on."""
        return replace(self, vectors=self.vectors[first : first + count])

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyOffset:
        return self
