"""Codes of states in C++: bytes and tables of `sides`, `nonuniform` and `gaussian` here, in one pass over states."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.gaussian import GaussianCodes, gaussian_levels
from kvtailor.ops.codes.nonuniform import ChannelLevels, LevelCodes, TokenLevels, largest
from kvtailor.ops.codes.quant import largest_step, packed_size
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.cpu.library import DTYPES, Bell, Coding, Fitting, Library, library

__all__ = ["bell_codes", "channel_codes", "level_codes", "symmetric_codes", "token_codes", "unsuited_states"]

# Below so many states a barrier costs more than a second thread brings.
_SMALL = 1 << 17
# What tells how much scratch a kernel takes.
_SCRATCH = {"code": "coding_scratch", "fit": "fitting_scratch", "bell": "bell_scratch"}


def unsuited_states(states: Tensor) -> str | None:
    """Why these states (m, s, c) cannot be quantised here, a clause; None where they can."""
    if states.device.type != "cpu" or states.dtype not in DTYPES:
        return (
            f"the C++ kernels quantise float32, bfloat16 and float16 on the CPU, not {states.dtype} on {states.device}"
        )
    return None


def token_codes(states: Tensor, bits: int, group: int, using: Library | None = None) -> TokenCodes:
    """`TokenCodes.of`, for states that `unsuited_states` found nothing against; `using`: the variant or the best."""
    if states.shape[-1] % group:
        raise ValueError(f"{states.shape[-1]} channels of {tuple(states.shape)} do not make groups of {group}")
    step = _tables(states, states.shape[1], group)
    low = huge_pages.new_empty(step, step.shape)
    codes = _codes(states, bits, group, step, low, by_run=False, using=using)
    return TokenCodes(bits=bits, size=states.shape[-1], codes=codes, step=step, low=low)


def symmetric_codes(states: Tensor, bits: int, using: Library | None = None) -> TokenCodes:
    """`TokenCodes.symmetric`; see `token_codes`."""
    size = states.shape[-1]
    step = _tables(states, states.shape[1], size)
    codes = _codes(states, bits, size, step, None, by_run=False, using=using)
    return TokenCodes(bits=bits, size=size, codes=codes, step=step)


def channel_codes(states: Tensor, bits: int, group: int, using: Library | None = None) -> ChannelCodes:
    """`ChannelCodes.of`; see `token_codes`."""
    step = _tables(states, -(-states.shape[1] // group), 1)
    low = huge_pages.new_empty(step, step.shape)
    codes = _codes(states, bits, group, step, low, by_run=True, using=using)
    return ChannelCodes(group=group, bits=bits, size=states.shape[-1], codes=codes, step=step, low=low)


def level_codes(
    states: Tensor,
    bits: int,
    group: int,
    share: float,
    *,
    by_channel: bool,
    dense: Tensor | None = None,
    whole: Tensor | None = None,
    levels: Tensor | None = None,
    using: Library | None = None,
) -> LevelCodes:
    """`coded_by_levels`; see `token_codes`."""
    lanes, slots, size = states.shape
    runs = -(-slots // group)
    codes = huge_pages.empty((lanes, slots, packed_size(size, bits)), torch.uint8)
    low = huge_pages.new_empty(states, (lanes, runs, size) if by_channel else (lanes, slots, 1))
    reach, fitted = huge_pages.new_empty(low, low.shape), huge_pages.new_empty(states, (lanes, runs, 2**bits))
    far = torch.empty((lanes, slots, size), dtype=torch.bool)
    counted = None if dense is None else dense.contiguous()
    given = None if levels is None else levels.to(torch.float32).contiguous()
    call = Fitting(
        dense=None if counted is None else counted.data_ptr(),
        given=None if given is None else given.data_ptr(),
        codes=codes.data_ptr(),
        low=low.data_ptr(),
        reach=reach.data_ptr(),
        levels=fitted.data_ptr(),
        far=far.data_ptr(),
        bits=bits,
        group=group,
        by_token=not by_channel,
        share=share,
        largest=largest(states.dtype),
    )
    _run(call, states, "fit", using)
    made = ChannelLevels if by_channel else TokenLevels
    return made.of(states, bits, group, codes=codes, low=low, reach=reach, levels=fitted, far=far, whole=whole)


def bell_codes(states: Tensor, bits: int, *, keep_norm: bool, using: Library | None = None) -> GaussianCodes:
    """`GaussianCodes.of`; see `token_codes`."""
    lanes, slots, size = states.shape
    borders, squares = _bell(bits)
    codes = huge_pages.empty((lanes, slots, packed_size(size, bits)), torch.uint8)
    scale = huge_pages.new_empty(states, (lanes, slots, 1))
    call = Bell(
        borders=borders.data_ptr(),
        squares=squares.data_ptr() if keep_norm else None,
        codes=codes.data_ptr(),
        scale=scale.data_ptr(),
        bits=bits,
        largest=largest(states.dtype),
    )
    _run(call, states, "bell", using)
    return GaussianCodes(bits=bits, size=size, codes=codes, scale=scale)


@cache
def _bell(bits: int) -> tuple[Tensor, Tensor]:
    """Borders (2^bits - 1,) float32 between the levels of a bell, and their squares (2^bits,) float64."""
    with torch.inference_mode(False):
        levels = gaussian_levels(bits)
        return (levels[1:] + levels[:-1]) / 2, levels.double().square()


def _tables(states: Tensor, rows: int, group: int) -> Tensor:
    return huge_pages.new_empty(states, (states.shape[0], rows, states.shape[2] // group))


def _codes(
    states: Tensor, bits: int, group: int, step: Tensor, low: Tensor | None, *, by_run: bool, using: Library | None
) -> Tensor:
    lanes, slots, size = states.shape
    codes = huge_pages.empty((lanes, slots, packed_size(size, bits)), torch.uint8)
    call = Coding(
        codes=codes.data_ptr(),
        step=step.data_ptr(),
        low=None if low is None else low.data_ptr(),
        bits=bits,
        group=group,
        by_run=by_run,
    )
    if low is None:
        call.limit = largest_step(states.dtype, 2 ** (bits - 1) - 1)
    _run(call, states, "code", using)
    return codes


def _run(call: Coding | Fitting | Bell, states: Tensor, operation: str, using: Library | None) -> None:
    """Tell a call of the states (m, s, c), and run it: "code", "fit" or "bell"."""
    used = using or library()
    assert used is not None, "asked for a kernel that was not built"
    read = states if states.stride(-1) == 1 else states.contiguous()
    call.states, call.kind = read.data_ptr(), DTYPES[read.dtype]
    call.lanes, call.slots, call.size = read.shape
    call.lane_bytes, call.slot_bytes = (stride * read.element_size() for stride in read.stride()[:2])
    threads = torch.get_num_threads() if states.numel() > _SMALL else 1
    used.run(operation, call, scratch=_SCRATCH[operation], threads=threads)
