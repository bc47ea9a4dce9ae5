"""What attention of few new tokens over one part takes, whichever form of it runs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvtailor.ops.segments.coded import Coded
from kvtailor.ops.segments.turned import Offsetting, Turned

__all__ = ["AttentionInputs"]


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
