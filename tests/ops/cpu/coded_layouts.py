"""The layouts that the C++ kernels read, states to fill them, and what they then stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtailor.ops.codes.floats import MxCodes, NvCodes
from kvtailor.ops.codes.gaussian import GaussianCodes, ResidualCodes
from kvtailor.ops.codes.ggml import FORMATS, GgmlCodes
from kvtailor.ops.codes.grids import GridCodes
from kvtailor.ops.codes.nonuniform import coded_by_levels
from kvtailor.ops.codes.quant import largest_divisor
from kvtailor.ops.codes.sides import ChannelCodes, FloatCodes, TokenCodes
from kvtailor.ops.cpu.library import built, load
from kvtailor.ops.segments.coded import Coded, Whole

__all__ = ["COARSE", "GGML", "LAYOUTS", "every_dtype", "every_variant", "exact", "needs_built", "states_of", "width_of"]

_LOADED = [each for each in map(load, built().values()) if each is not None]
every_variant = pytest.mark.parametrize("library", _LOADED, ids=lambda each: each.variant)
needs_built = pytest.mark.skipif(not _LOADED, reason="the C++ kernels were not built: no compiler")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Where a cache of codes has 16 bits, one variant gives queries 16 bits too: half of what int8 may lose.
COARSE = 5e-4

LAYOUTS: dict[str, Callable[[Tensor], Coded]] = {
    "plain": lambda states: Whole(states=states),
    **{f"vector{bits}": partial(TokenCodes.symmetric, bits=bits) for bits in (2, 3, 4, 5, 8)},
    **{
        f"tokens{bits}": lambda states, bits=bits: TokenCodes.of(states, bits, largest_divisor(states.shape[-1], 32))
        for bits in (1, 2, 4, 8)
    },
    **{
        f"tokens{bits}x64": lambda states, bits=bits: TokenCodes.of(states, bits, largest_divisor(states.shape[-1], 64))
        for bits in (4, 8)
    },
    "tokens4x8": lambda states: TokenCodes.of(states, 4, 8),
    **{f"channels{bits}": partial(ChannelCodes.of, bits=bits, group=32) for bits in (2, 3, 4, 8)},
    **{f"levels{bits}": partial(GaussianCodes.of, bits=bits, keep_norm=bits % 2 == 0) for bits in (1, 2, 3, 4, 5, 8)},
    **{f"grid{bits}": partial(GridCodes.of, bits=bits, keep_norm=bits % 2 == 0) for bits in (2, 3, 4)},
    **{f"signs{bits}": partial(ResidualCodes.of, bits=bits, state=1, keep_norm=bits % 2 == 0) for bits in (2, 3, 5)},
    "nvfp4": partial(NvCodes.of, block=16, group=32),
    "nvfp4x8": partial(NvCodes.of, block=8, group=3),
    "mxfp4": partial(MxCodes.of, element="e2m1", block=32),
    "mxfp8": partial(MxCodes.of, element="e4m3", block=32),
    "fp8": partial(FloatCodes.of, group=32),
    "fp8x3": partial(FloatCodes.of, group=3),
    "mxfp8_e5m2": partial(MxCodes.of, element="e5m2", block=32),
    "fitted2": partial(coded_by_levels, bits=2, group=32, share=0.02, by_channel=False),
    "fitted3": partial(coded_by_levels, bits=3, group=32, share=0.05, by_channel=True),
    "fitted4": partial(coded_by_levels, bits=4, group=32, share=0.02, by_channel=False),
    "fitted4x20": partial(coded_by_levels, bits=4, group=20, share=0.3, by_channel=True),
    "fitted5": partial(coded_by_levels, bits=5, group=7, share=0.0, by_channel=True),
    "channels4x5": partial(ChannelCodes.of, bits=4, group=5),
}

# Of sizes that blocks of 32 channels divide. Half of the steps are negative where a block has no minimum, but of q8_0.
GGML: dict[str, Callable[[Tensor], Coded]] = {format: partial(GgmlCodes.of, format=format) for format in FORMATS}


def states_of(seed: int, dtype: torch.dtype, lanes: int, slots: int, size: int) -> tuple[Tensor, Tensor]:
    state = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((lanes, slots, size), generator=state).to(dtype) for _ in range(2))
    return keys, values


def exact(side: Coded) -> Tensor:
    """What the side stands for in its own coordinates, in float64: the tables widened before they are used."""
    if isinstance(side, Whole):
        return side.states.double()
    wide: dict[str, Any] = {name: x.double() for name, x in side.tensors().items() if x.is_floating_point()}
    if isinstance(side, MxCodes | NvCodes | GgmlCodes):
        wide["dtype"] = "float64"
    return replace(side, **wide).stored()


def width_of(side: Coded) -> int:
    """Numbers of a query for what is stored."""
    return exact(side).shape[-1]
