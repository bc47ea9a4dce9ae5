"""Random numbers of held tokens that follow from their places alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.types import Held

__all__ = ["uniform"]

_LOW = 0xFFFFFFFF


def uniform(held: Held, state: int, times: Tensor | None = None) -> Tensor:
    """One number for each held token, the same however the text is cut into chunks or batches.

    Args:
        held: whose layer, heads and columns count; a token is known by its distance to its row's first.
        state: which draw; any integer.
        times: (b, 1, 1) int64: which of several draws of the same tokens; None: the only one.

    Returns:
        (b, h, n) float32 in [0, 1).
    """
    device = held.positions.device
    seed = _mix(torch.full((), state & _LOW, device=device))
    layer = _mix(seed ^ held.layer)
    heads = held.positions.shape[1]
    head = _mix(layer ^ (torch.arange(heads, device=device) + held.share.first(heads)))[None, :, None]
    if times is not None:
        head = _mix(head ^ _mix(times & _LOW))
    age = held.positions - held.first[:, None, None]
    drawn = _mix(head ^ _mix(age & _LOW))
    return (drawn >> 8).to(torch.float32) / 2**24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) that scatters neighbours: shifts and odd multipliers, twice."""
    for multiplier in (0x5BD1E995, 0x3C6EF373):
        x = ((x ^ (x >> 16)) * multiplier) & _LOW
    return x ^ (x >> 15)
