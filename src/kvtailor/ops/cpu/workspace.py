"""Scratch of the calls that take decoded tokens."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["WORKSPACE"]


class _Workspace(threading.local):
    """Scratch of a thread's steps: of no cache, and as large as the largest has needed.

    Attributes:
        mark: another object whenever the scratch lies elsewhere. Steps keep it in place of the scratch, which would
            else be memory that their cache holds.
    """

    floats: Tensor = torch.empty(0, dtype=torch.float32)
    mark: object = None

    def at(self, count: int) -> int:
        """Address of so many floats."""
        if self.mark is None or self.floats.numel() < count:
            self.floats, self.mark = torch.empty(count, dtype=torch.float32), object()
        return self.floats.data_ptr()


WORKSPACE = _Workspace()
