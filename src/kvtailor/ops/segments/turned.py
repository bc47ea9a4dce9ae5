"""Keys that are changed by their positions after they are read: each by itself, and not by one map for all."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvtailor.types import Coordinates, KeyOffset, Layout, Rotation

__all__ = ["Offsetting", "Turned", "Turning"]


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


class Offsetting(NamedTuple):
    """A constant that keys have besides what is stored, so that each logit gets the query's product with it.

    Attributes:
        offset: of the layer's heads that are here.
        first: (m,) int64 column from which each lane's positions count; None: 0.
        layout: of the lanes that are stored.
    """

    offset: KeyOffset
    first: Tensor | None
    layout: Layout
