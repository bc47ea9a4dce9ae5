"""The kept tokens of padded rows, one behind the other."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kept_first", "kept_states", "place_among_kept", "places_of"]


def kept_first(keep: Tensor, each: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where the kept tokens of each row and head stand.

    Args:
        keep: (b, h, n) bool.
        each: (b, h) int64 on the CPU: how many of each are kept; None: the host waits for the most.

    Returns:
        (b, h, k) int64 indices along n of the kept tokens in time order, k the most of any head, those that are not
        kept as filler behind; (b, h, k) bool: no filler.
    """
    counts = keep.sum(-1)
    most = int((counts if each is None else each).max())
    order = torch.argsort((~keep).to(torch.uint8), dim=-1, stable=True)[..., :most]
    return order, torch.arange(most, device=keep.device) < counts[..., None]


def places_of(chosen: Tensor, count: int | None) -> Tensor:
    """(k,) int64 ascending: the `count` places at which `chosen` (n,) bool is set; None: the host waits to count."""
    if count is None or chosen.device.type == "cpu":
        return chosen.nonzero()[:, 0]
    return torch.argsort((~chosen).to(torch.uint8), stable=True)[:count]


def kept_states(states: Tensor, index: Tensor, filled: Tensor) -> Tensor:
    """(b, h, k, d) the states (b, h, n, d) at the indices of `kept_first`, zeros where there is filler."""
    wide = index[..., None].expand(*index.shape, states.shape[-1])
    return states.gather(2, wide).masked_fill_(~filled[..., None], 0.0)


def place_among_kept(keep: Tensor) -> Tensor:
    """(b, h, n) int64: for each kept token its index along k, see `kept_first`."""
    return keep.cumsum(-1) - 1
