"""Keys that are turned by their positions after they are read: a map of each token, and not one for all."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvtailor.types import Coordinates, Layout, Rotation

__all__ = ["Turned", "Turning"]


class Turning(NamedTuple):
    """By how much keys are turned.

    Attributes:
        rotation: of the layer.
        first: (m,) int64 column from which each lane's positions count, the same for all lanes of a row; None: 0.
    """

    rotation: Rotation
    first: Tensor | None


class Turned(NamedTuple):
    """How keys that are stored become those of the model.

    Attributes:
        rotation, first: see `Turning`, of the lanes that are stored.
        layout: of these lanes.
        keys_in: in which coordinates the keys are before they are turned, the model's side first.
        joined: kv heads that share a lane.
    """

    rotation: Rotation
    first: Tensor | None
    layout: Layout
    keys_in: tuple[Coordinates, ...]
    joined: int
