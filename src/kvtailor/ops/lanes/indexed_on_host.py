"""What the host knows of an index of chunks that it has made, so that it need not ask the device at every token."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["IndexedOnHost", "indexed_on_host", "note_index"]


@dataclass(frozen=True, kw_only=True)
class IndexedOnHost:
    """Numbers of one index.

    Attributes:
        columns: of the carry's tensor of columns; None where there are no bounds.
        capacity: of each row.
        covered: tokens of each owner (row * h + head) that have bounds.
    """

    columns: weakref.ref[Tensor] | None
    capacity: tuple[int, ...]
    covered: tuple[int, ...]


_KNOWN = WeakTensorKeyDictionary()
"""By the carry's tensor of capacities. The engine has an index made anew where what is held changes otherwise than by
growing, so while the carry has these very tensors, all this still holds. Of copies and loaded carries nothing is known.
"""


def note_index(carry: Mapping[str, Tensor], counts: Tensor | None, capacity: Tensor, chunk: Tensor) -> None:
    """Keep what the host knows of a carry that it made.

    Args:
        carry: with "capacity", and with "columns" where there are bounds.
        counts: (b * h,) int64 on the CPU: tokens that were indexed; None: the host does not know them.
        capacity: (b,) int64 on the CPU.
        chunk: (b * h,) int64 on the CPU: tokens of a chunk, 0 where an owner has no bounds.
    """
    columns = carry.get("columns")
    if counts is None:
        _KNOWN.pop(carry["capacity"], None)
        return
    covered = torch.zeros_like(counts) if columns is None else torch.where(chunk > 0, counts, 0)
    _KNOWN[carry["capacity"]] = IndexedOnHost(
        columns=None if columns is None else weakref.ref(columns),
        capacity=tuple(capacity.tolist()),
        covered=tuple(covered.tolist()),
    )


def indexed_on_host(carry: Mapping[str, Tensor]) -> IndexedOnHost | None:
    """What the host knows of this very carry; None: nothing."""
    known, columns = _KNOWN.get(carry["capacity"]), carry.get("columns")
    if known is None or (known.columns is None) != (columns is None):
        return None
    return known if known.columns is None or known.columns() is columns else None
