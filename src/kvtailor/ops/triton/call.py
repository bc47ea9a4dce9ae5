"""One launch of a kernel, as data: what is run on a GPU is what is compiled where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        registers: that a thread may have; None: as many as the assembler thinks best, which can mean a few spilled.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """How it is compiled, in Triton's words."""
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **most}

    def __call__(self) -> None:
        """Launches it on the device of its tensors."""
        device = next(each.device for each in self.arguments.values() if isinstance(each, Tensor))
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self._launch()

    def _launch(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)
