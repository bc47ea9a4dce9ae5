"""Codes of states in C++: bytes and tables of `ops.codes.sides` and `ops.codes.nonuniform`, in one pass over states."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.nonuniform import ChannelLevels, LevelCodes, TokenLevels, largest
from kvtailor.ops.codes.quant import largest_step, packed_size
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.cpu.library import DTYPES, Coding, Fitting, Library, library

__all__ = ["channel_codes", "level_codes", "symmetric_codes", "token_codes", "unsuited_states"]

# Below so many states a barrier costs more than a second thread brings.
_SMALL = 1 << 17


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
    used = using or library()
    assert used is not None, "asked for a kernel that was not built"
    lanes, slots, size = states.shape
    read = states if states.stride(-1) == 1 else states.contiguous()
    runs = -(-slots // group)
    codes = huge_pages.empty((lanes, slots, packed_size(size, bits)), torch.uint8)
    low = huge_pages.new_empty(states, (lanes, runs, size) if by_channel else (lanes, slots, 1))
    reach, fitted = huge_pages.new_empty(low, low.shape), huge_pages.new_empty(states, (lanes, runs, 2**bits))
    far = torch.empty((lanes, slots, size), dtype=torch.bool)
    counted = None if dense is None else dense.contiguous()
    given = None if levels is None else levels.to(torch.float32).contiguous()
    lane, slot, _ = read.stride()
    call = Fitting(
        states=read.data_ptr(),
        dense=None if counted is None else counted.data_ptr(),
        given=None if given is None else given.data_ptr(),
        codes=codes.data_ptr(),
        low=low.data_ptr(),
        reach=reach.data_ptr(),
        levels=fitted.data_ptr(),
        far=far.data_ptr(),
        lane_bytes=lane * read.element_size(),
        slot_bytes=slot * read.element_size(),
        kind=DTYPES[read.dtype],
        lanes=lanes,
        slots=slots,
        size=size,
        bits=bits,
        group=group,
        by_token=not by_channel,
        share=share,
        largest=largest(read.dtype),
    )
    scratch = _threads(call, used, states.numel(), used.functions.kvtailor_fitting_scratch)
    if used.functions.kvtailor_fit(ctypes.byref(call)):
        raise RuntimeError("torch_parallel_for refused to run kvtailor's quantiser")
    del scratch
    made = ChannelLevels if by_channel else TokenLevels
    return made.of(states, bits, group, codes=codes, low=low, reach=reach, levels=fitted, far=far, whole=whole)


def _threads(call: Coding | Fitting, used: Library, numbers: int, room: Callable[[Any], int]) -> Tensor:
    """Give a call its threads, and scratch, which is to live as long as the call."""
    call.threads = 1
    if used.parallel_for is not None and numbers > _SMALL:
        call.threads = torch.get_num_threads()
        call.parallel_for = used.parallel_for
    scratch = torch.empty(room(ctypes.byref(call)), dtype=torch.float32)
    call.scratch = scratch.data_ptr()
    return scratch


def _tables(states: Tensor, rows: int, group: int) -> Tensor:
    return huge_pages.new_empty(states, (states.shape[0], rows, states.shape[2] // group))


def _codes(
    states: Tensor, bits: int, group: int, step: Tensor, low: Tensor | None, *, by_run: bool, using: Library | None
) -> Tensor:
    used = using or library()
    assert used is not None, "asked for a kernel that was not built"
    lanes, slots, size = states.shape
    read = states if states.stride(-1) == 1 else states.contiguous()
    codes = huge_pages.empty((lanes, slots, packed_size(size, bits)), torch.uint8)
    lane, slot, _ = read.stride()
    call = Coding(
        states=read.data_ptr(),
        codes=codes.data_ptr(),
        step=step.data_ptr(),
        low=None if low is None else low.data_ptr(),
        lane_bytes=lane * read.element_size(),
        slot_bytes=slot * read.element_size(),
        kind=DTYPES[read.dtype],
        lanes=lanes,
        slots=slots,
        size=size,
        bits=bits,
        group=group,
        by_run=by_run,
    )
    if low is None:
        call.limit = largest_step(read.dtype, 2 ** (bits - 1) - 1)
    scratch = _threads(call, used, states.numel(), used.functions.kvtailor_coding_scratch)
    if used.functions.kvtailor_code(ctypes.byref(call)):
        raise RuntimeError("torch_parallel_for refused to run kvtailor's quantiser")
    del scratch
    return codes
