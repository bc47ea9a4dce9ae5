"""Named tensors as one run of bytes, and back as views of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packing"]

# The alignment of vector loads, and of torch's own tensors on the CPU.
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where each tensor lies.

    Attributes:
        places: by name the first byte, the dtype and the shape; tensors that were one tensor lie in one place.
        size: bytes of the run.
        padding: of these, bytes between tensors.
    """

    places: Mapping[str, tuple[int, torch.dtype, tuple[int, ...]]]
    size: int
    padding: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Packing:
        """The packing of these tensors, in their order."""
        places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        first: dict[tuple[object, ...], int] = {}
        end = filled = 0
        for name, tensor in tensors.items():
            if not tensor.numel():
                places[name] = 0, tensor.dtype, tuple(tensor.shape)
                continue
            same = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if same not in first:
                first[same] = -(-end // _ALIGNMENT) * _ALIGNMENT
                size = tensor.numel() * tensor.element_size()
                end, filled = first[same] + size, filled + size
            places[name] = first[same], tensor.dtype, tuple(tensor.shape)
        return cls(places=places, size=end, padding=end - filled)

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(first byte, flat uint8 tensor) for each place, ascending, without gaps filled; the tensors of `of`."""
        done = -1
        for name, tensor in tensors.items():
            start = self.places[name][0]
            if start > done and tensor.numel():
                done = start
                yield start, tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    def views(self, run: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views of a run (size,) uint8."""
        found = {}
        for name, (start, dtype, shape) in self.places.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = run[start : start + size].view(dtype).view(shape)
        return found
