"""States at some slots, whatever memory they lie in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_slots"]

# Numbers of a row from which on copying it whole is faster than looking each up (6 times, for 64 codes of a byte).
_WIDE = 16


def at_slots(states: Tensor, at: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return `states[at]`, a copy.

    Args:
        states: (m, s, ...).
        at: int64 lanes and slots that broadcast to (m', s'). None of them is negative.
        out: (m', s', ...) contiguous, which it is written to; autograd forbids it. None: a new tensor.
    """
    table = _as_rows(states)
    if table is not None:
        # Whole rows are copied, where indices of two dimensions are looked up number by number.
        rows, apart = table
        found = (at[0] * apart + at[1]).flatten()
        if out is None:
            shape = torch.broadcast_shapes(at[0].shape, at[1].shape)
            return rows.index_select(0, found).view(*shape, rows.shape[1])
        torch.index_select(rows, 0, found, out=out.view(-1, rows.shape[1]))
        return out
    if out is None:
        return states[at]
    torch.ops.aten.index.Tensor_out(states, list(at), out=out)
    return out


def _as_rows(states: Tensor) -> tuple[Tensor, int] | None:
    """Return states (m, s, d) as rows (r, d) of one table, without a copy, and how many rows lie from lane to lane.

    None where rows are narrow, lanes do not begin a whole number of slots apart, or autograd follows.
    """
    ours = type(states) is Tensor and states.device.type == "cpu" and not states.requires_grad
    if not ours or states.ndim != 3 or states.shape[2] < _WIDE:
        return None
    lanes, slots, size = states.shape
    lane, slot, channel = states.stride()
    if channel != 1 or slot < size or lane % slot or 0 in (lanes, slots):
        return None
    apart = lane // slot
    return states.as_strided(((lanes - 1) * apart + slots, size), (slot, 1)), apart
