"""What a network of this folder reads of a token: the key of its own kv head, turned back, and its value."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Held

__all__ = ["own_token"]


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
