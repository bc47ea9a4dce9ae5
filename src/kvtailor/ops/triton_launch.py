"""Whether Triton's kernels can run here, and one launch of a kernel as data.

What is launched on a GPU is what is compiled where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = ["interpreting", "missing", "unfit", "LOG2E", "Launch"]


def missing() -> str | None:
    """Why no kernel of this package can be imported here; None where they can."""
    if find_spec("triton") is None:
        return "triton is not installed; `pip install kvtailor[gpu]` brings it"
    return None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 before triton was imported."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def unfit(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why kernels should not run on tensors of this device and these dtypes; None where they should.

    In the interpreter tensors of the CPU count as those of a GPU, so that what is wired can be tested without one.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"the kernels are built for compute capability 8.0 and newer, found {major}.{minor}"
        return None
    if device.type != "cpu" or not interpreting():
        return f"Triton's kernels run on a CUDA device, found {device}"
    if torch.bfloat16 in dtypes:
        return "Triton's interpreter multiplies bfloat16 wrongly without a word"
    return None


LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Launch:
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
