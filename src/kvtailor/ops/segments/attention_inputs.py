"""What attention of few new tokens over one part takes, whichever form of it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvtailor.ops.segments.coded import Coded
from kvtailor.types import Coordinates, KeyOffset, Layout, Rotation

__all__ = ["Offsetting", "Turned", "Turning", "BestPages", "AttentionInputs"]


class Turning(NamedTuple):
    """By how much keys are turned.

    Attributes:
        rotation: of the layer.
        first: (m,) int64 column from which each lane's positions count, the same for all lanes of a row, or (m, s) that
            of each slot; None: 0.
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
        first: (m,) int64 column from which each lane's positions count, or (m, s) that of each slot; None: 0.
        layout: of the lanes that are stored.
    """

    offset: KeyOffset
    first: Tensor | None
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class BestPages:
    """What is read of some parts: the pages with the highest bounds over all parts, and all of those without pages.

    Attributes:
        page: slots of a page; the last of a lane may have fewer.
        most: pages that are read of each row and kv head, where there are as many.
        bounds: of each part the least and the greatest of each key channel over a page, (m, p, d); None: no pages.
    """

    page: int
    most: int
    bounds: Sequence[tuple[Tensor, Tensor] | None]


class AttentionInputs(NamedTuple):
    """Queries of the new tokens, keys and values of one part as they are stored, and what the softmax is taken over.

    Every form gives out (n, g, t, dv) float32, zeros where a query sees nothing, and lse (n, g, t) float32, -inf there.

    A tuple, since a decoded token makes one for each part.

    Attributes:
        query: (n, g, t, d), any float dtype; n = b * h.
        keys, values: (m, s, d) and (m, s, dv).
        scaling: factor before the softmax.
        softcap: logits l are softcap * tanh(l / softcap); None: as they are.
        owner: (m,) int64 ascending row * h + head of each lane; None: lane i belongs to owner i.
        lengths: (m,) int32 filled slots of each lane; None: all.
        visible: bool that broadcasts to (m, t, s); None: every query sees every slot.
        log_weight: (m, s) float32 added to the logits; None: nothing.
        turned: the keys are to be turned, and the query is for what they are then; None: they are not. In C++ alone.
        offset: a constant that the keys lack, and the query in the model's channels; None: they lack none. In C++
            alone.
    """

    query: Tensor
    keys: Coded
    values: Coded
    scaling: float
    softcap: float | None = None
    owner: Tensor | None = None
    lengths: Tensor | None = None
    visible: Tensor | None = None
    log_weight: Tensor | None = None
    turned: Turned | None = None
    offset: tuple[Offsetting, Tensor] | None = None
