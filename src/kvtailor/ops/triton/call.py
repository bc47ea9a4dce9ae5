"""One launch of a kernel, as data: what is run on a GPU is what is compiled where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LOG2E", "Call"]

LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Call:
    """A kernel, its grid, its arguments by name, and how it is compiled.

    Attributes:
        kernel: a function of `triton.jit`.
        grid: programs along each axis.
        arguments: tensors, numbers and constants.
        warps, stages: of a program, and of its pipelined loads.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    warps: int
    stages: int

    def __call__(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)
