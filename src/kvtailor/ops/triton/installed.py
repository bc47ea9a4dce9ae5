"""Whether Triton's kernels can run here, and how."""

from __future__ import annotations

from importlib.util import find_spec

import torch

__all__ = ["interpreting", "missing", "unfit"]


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
