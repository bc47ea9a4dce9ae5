"""Attention of few queries over coded lanes, in C++: reads the small bytes once, and writes nothing but the answer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.attention.inputs import AttentionInputs
from kvtailor.ops.codes.floats import ELEMENTS, MxCodes, NvCodes, levels_of
from kvtailor.ops.codes.gaussian import GaussianCodes, padded_levels
from kvtailor.ops.codes.grids import GridCodes, tables_of
from kvtailor.ops.codes.nonuniform import LevelCodes, TokenLevels
from kvtailor.ops.codes.residual import ResidualCodes
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.cpu import magnitudes
from kvtailor.ops.cpu.library import DTYPES, Call, Library, Side, Turn, library
from kvtailor.ops.cpu.offset import offset_of
from kvtailor.ops.cpu.turned import turn_of
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.ops.segments.pair_sides import Magnified

__all__ = ["Kept", "attend_coded", "attend_keeping", "call_of", "run", "side_of", "threads_for", "unsuited"]

_TOKEN_CODES, _CHANNEL_CODES, _LEVEL_CODES, _BLOCK_LEVELS, _GRID_CODES, _SIGNED_LEVELS, _FITTED_LEVELS = range(3, 10)
# Types of the scales of `_BLOCK_LEVELS`, see layouts.h.
_E4M3, _E8M0 = 3, 4
# By how many bits a byte's exponent and mantissa lie below those of a float32.
_SHIFTS = {"e2m1": 0, "e4m3": 20, "e5m2": 21}
_CODES = TokenCodes | ChannelCodes | GaussianCodes | GridCodes | ResidualCodes | MxCodes | NvCodes | LevelCodes
_READ = Whole | _CODES
# The same numbers as in attention.cpp, where a step parts its calls itself.
# Slots of a piece of work are a multiple of it: below, what a piece finds is as large as what it reads.
_LEAST = 256
_PIECES = 8
# Below so many multiplications a barrier costs more than a second thread brings.
_SMALL = 1 << 19
_REFUSED = "torch_parallel_for refused to run kvtailor's attention kernel"


def unsuited(keys: Coded, values: Coded) -> str | None:
    """Why these two sides cannot be read here, a clause; None where they can."""
    # Written out, since a decoded token asks it of every part of every layer that goes the general way.
    for side in (keys, values):
        if isinstance(side, Magnified):
            if (why := magnitudes.unsuited(side)) is not None:
                return why
            side = side.directions
        if isinstance(side, Whole):
            dtype, device = side.states.dtype, side.states.device
        elif isinstance(side, TokenCodes | ChannelCodes):
            dtype, device = side.step.dtype, side.step.device
        elif isinstance(side, GaussianCodes | GridCodes | ResidualCodes):
            dtype, device = side.scale.dtype, side.scale.device
        elif isinstance(side, MxCodes | NvCodes):
            dtype, device = getattr(torch, side.dtype), side.codes.device
        elif isinstance(side, LevelCodes):
            dtype, device = side.low.dtype, side.low.device
        else:
            return f"no C++ kernel reads {type(side).__name__}"
        if device.type != "cpu" or dtype not in DTYPES:
            return f"the C++ kernels read float32, bfloat16 and float16 on the CPU, not {dtype} on {device}"
    return None


@dataclass(frozen=True)
class Kept:
    """Softmax weights that a call left behind.

    Attributes:
        call: as it was made.
        held: what it points to.
        used: the variant that made it.
    """

    call: Call
    held: list[Tensor]
    used: Library

    def mass(self, lse: Tensor, counts: Tensor) -> Tensor:
        """(m, s) float32: the attention that each slot received, 0 past what is filled.

        Args:
            lse: (n, g, t) float32 over all parts that were read.
            counts: (n, t) float32: how much each query counts.
        """
        mass = torch.empty((self.call.lanes, self.call.slots), dtype=torch.float32)
        held: list[Tensor] = []
        self.call.lse, self.call.counts = _pointer(lse, torch.float32, held), _pointer(counts, torch.float32, held)
        self.call.mass = mass.data_ptr()
        if self.used.functions.kvtailor_mass(ctypes.byref(self.call)):
            raise RuntimeError(_REFUSED)
        return mass


def attend_coded(inputs: AttentionInputs, *, using: Library | None = None) -> tuple[Tensor, Tensor]:
    """Attention over all slots of one part, on the CPU; see `unsuited` for what keys and values can be.

    Args:
        inputs: see `AttentionInputs`, which also says what is returned.
        using: the variant; None: the best.
    """
    call, held = call_of(inputs)
    return run(call, held, inputs.query.shape, using or library())


def attend_keeping(inputs: AttentionInputs, *, using: Library | None = None) -> tuple[Tensor, Tensor, Kept]:
    """As `attend_coded`, and the weights, of which mass can be made."""
    call, held = call_of(inputs)
    used = using or library()
    assert used is not None, "asked for a kernel that was not built"
    kept = torch.empty(used.functions.kvtailor_kept(ctypes.byref(call)), dtype=torch.float32)
    held.append(kept)
    call.kept = kept.data_ptr()
    return *run(call, held, inputs.query.shape, used), Kept(call, held, used)


def call_of(inputs: AttentionInputs) -> tuple[Call, list[Tensor]]:
    """The arguments of a call, and the tensors that it points to."""
    keys, values = inputs.keys, inputs.values
    owners, group, new, size = inputs.query.shape
    asked = inputs.query.reshape(owners, group * new, size).to(torch.float32).contiguous()
    held = [asked]
    call = Call(query=asked.data_ptr())
    call.made = made = list[Any]()
    if Magnified in (type(keys), type(values)):
        keys, values = magnitudes.directions_of(call, keys, values, held, made)
    call.keys, call.values = side_of(keys, held, made), side_of(values, held, made)
    lanes, slots = _shape(values)
    call.owners, call.lanes, call.slots = owners, lanes, slots
    call.rows, call.queries, call.scaling = group * new, new, inputs.scaling
    if inputs.turned is not None:
        made.append(turn_of(inputs.turned, size, slots, held, made))
        call.turn = ctypes.addressof(made[-1])
    if inputs.offset is not None:
        made.append(offset_of(*inputs.offset, held, made))
        call.offset = ctypes.addressof(made[-1])
    if inputs.softcap is not None:
        call.softcap = inputs.softcap
    if inputs.owner is not None:
        call.owner = _pointer(inputs.owner, torch.int64, held)
    if inputs.lengths is not None:
        call.lengths = _pointer(inputs.lengths, torch.int32, held)
    if inputs.log_weight is not None:
        call.log_weight = _pointer(inputs.log_weight, torch.float32, held)
    if inputs.visible is not None:
        seen = inputs.visible.expand(lanes, new, slots)
        held.append(seen)
        call.visible = seen.data_ptr()
        call.visible_lane, call.visible_query, call.visible_slot = seen.stride()
    return call, held


def run(call: Call, held: list[Tensor], shape: torch.Size, used: Library | None) -> tuple[Tensor, Tensor]:
    """Outputs and lse for a query of this shape."""
    assert used is not None, "asked for a kernel that was not built"
    owners, group, new, _ = shape
    threads_for(call, used)
    out = torch.empty((owners, group, new, call.values.size), dtype=torch.float32)
    lse = torch.empty((owners, group, new), dtype=torch.float32)
    at = ctypes.byref(call)
    found = torch.empty(used.functions.kvtailor_found(at), dtype=torch.float32)
    scratch = torch.empty(used.functions.kvtailor_scratch(at), dtype=torch.float32)
    call.out, call.lse, call.found, call.scratch = (each.data_ptr() for each in (out, lse, found, scratch))
    if used.functions.kvtailor_attend(at):
        raise RuntimeError(_REFUSED)
    return out, lse


def threads_for(call: Call, used: Library) -> None:
    """Say how many threads a call takes, and how many slots each piece of it has."""
    lanes, slots, threads = call.lanes, call.slots, 1
    alike = Turn.from_address(call.turn).alike if call.turn else 1
    if used.parallel_for is not None and lanes * slots * call.rows * call.keys.size > _SMALL:
        threads = torch.get_num_threads()
        call.parallel_for = used.parallel_for
    call.threads = threads
    each = -(-lanes // alike * slots // (_PIECES * threads))
    call.chunk = max(_LEAST, -(-min(each, slots) // _LEAST) * _LEAST)


def _shape(side: Coded) -> tuple[int, int]:
    assert isinstance(side, _READ)
    lanes, slots, _ = side.states.shape if isinstance(side, Whole) else side.codes.shape
    return lanes, slots


def side_of(side: Coded, held: list[Tensor], made: list[Any]) -> Side:
    """Return a side as C++ sees it; what it points to joins `held`, what was made for it alone joins `made`."""
    if isinstance(side, Whole):
        states = side.states if side.states.stride(-1) == 1 else side.states.contiguous()
        held.append(states)
        element = states.element_size()
        lane, slot, _ = states.stride()
        kind = DTYPES[states.dtype]
        return Side(
            data=states.data_ptr(),
            lane_bytes=lane * element,
            slot_bytes=slot * element,
            kind=kind,
            size=states.shape[2],
        )
    assert isinstance(side, _CODES)
    codes = side.codes if side.codes.stride(-1) == 1 else side.codes.contiguous()
    lane, slot, _ = codes.stride()
    if isinstance(side, MxCodes | NvCodes):
        held.append(codes)
        return _blocks_of(side, codes, held, made)
    if isinstance(side, ResidualCodes):
        held.append(codes)
        return _signs_of(side, codes, held, made)
    if isinstance(side, LevelCodes):
        held.append(codes)
        return _fitted_of(side, codes, held, made)
    if isinstance(side, GaussianCodes | GridCodes):
        dtype, grid = side.scale.dtype, isinstance(side, GridCodes)
        held.append(codes)
        return Side(
            data=codes.data_ptr(),
            step=_pointer(side.scale, dtype, held),
            # Kept for as long as the process runs.
            low=(tables_of if grid else padded_levels)(side.bits).data_ptr(),
            lane_bytes=lane,
            slot_bytes=slot,
            kind=_GRID_CODES if grid else _LEVEL_CODES,
            scales=DTYPES[dtype],
            bits=2 * side.bits if grid else side.bits,
            size=side.size,
        )
    dtype = side.step.dtype
    found = Side(
        data=codes.data_ptr(),
        step=_pointer(side.step, dtype, held),
        low=None if side.low is None else _pointer(side.low, dtype, held),
        lane_bytes=lane,
        slot_bytes=slot,
        scales=DTYPES[dtype],
        bits=side.bits,
        size=side.size,
    )
    held.append(codes)
    if isinstance(side, TokenCodes):
        found.kind, found.group = _TOKEN_CODES, side.size // side.step.shape[-1]
        return found
    found.kind, found.group, found.runs = _CHANNEL_CODES, side.group, side.step.shape[1]
    if side.row is not None:
        found.row = _pointer(side.row, torch.int32, held)
    return found


def _blocks_of(side: MxCodes | NvCodes, codes: Tensor, held: list[Tensor], made: list[Any]) -> Side:
    """A side whose codes are levels with a scale for each block of channels."""
    lane, slot, _ = codes.stride()
    # Kept for as long as the process runs.
    blocks = [levels_of(side.element).data_ptr(), 0, 0, _SHIFTS[side.element], int(side.dtype != "float32")]
    found = Side(
        data=codes.data_ptr(),
        step=_pointer(side.scales, torch.uint8, held),
        lane_bytes=lane,
        slot_bytes=slot,
        kind=_BLOCK_LEVELS,
        scales=_E8M0 if isinstance(side, MxCodes) else _E4M3,
        bits=ELEMENTS[side.element].bits,
        size=side.size,
        group=side.block,
    )
    if isinstance(side, NvCodes):
        blocks[1:3] = _pointer(side.tensor_scale, torch.float32, held), side.group
        found.runs = side.tensor_scale.shape[1] if side.row is None else 0
        if side.row is not None:
            found.row = _pointer(side.row, torch.int32, held)
    # `Blocks` of layouts.h: two addresses and three numbers.
    made.append((ctypes.c_int64 * len(blocks))(*blocks))
    found.low = ctypes.addressof(made[-1])
    return found


def _fitted_of(side: LevelCodes, codes: Tensor, held: list[Tensor], made: list[Any]) -> Side:
    """A side of levels that were fitted, and of numbers kept aside."""
    dtype, whole = side.low.dtype, torch.uint8 if side.size < 256 else torch.int16
    tables = [_pointer(each, dtype, held) for each in (side.low, side.levels)]
    aside = [
        _pointer(side.counts, whole, held),
        _pointer(side.channels, whole, held),
        _pointer(side.exact, dtype, held),
    ]
    # `Fitted` of layouts.h: five addresses, one that the kernel writes, and a number.
    made.append((ctypes.c_int64 * 7)(*tables, *aside, 0, isinstance(side, TokenLevels)))
    lane, slot, _ = codes.stride()
    found = Side(
        data=codes.data_ptr(),
        step=_pointer(side.reach, dtype, held),
        low=ctypes.addressof(made[-1]),
        lane_bytes=lane,
        slot_bytes=slot,
        kind=_FITTED_LEVELS,
        scales=DTYPES[dtype],
        bits=side.bits,
        size=side.size,
        group=side.group,
        runs=side.levels.shape[1] if side.row is None else 0,
    )
    if side.row is not None:
        found.row = _pointer(side.row, torch.int32, held)
    return found


def _signs_of(side: ResidualCodes, codes: Tensor, held: list[Tensor], made: list[Any]) -> Side:
    """A side of levels, and behind them signs: of twice as many numbers as channels."""
    dtype = side.scale.dtype
    signs = side.signs if side.signs.stride(-1) == 1 else side.signs.contiguous()
    held.append(signs)
    # `Signs` of layouts.h: three addresses and two numbers. Levels are kept for as long as the process runs.
    levels, rest = padded_levels(side.bits).data_ptr(), _pointer(side.rest, dtype, held)
    made.append((ctypes.c_int64 * 5)(levels, signs.data_ptr(), rest, *signs.stride()[:2]))
    lane, slot, _ = codes.stride()
    return Side(
        data=codes.data_ptr(),
        step=_pointer(side.scale, dtype, held),
        low=ctypes.addressof(made[-1]),
        lane_bytes=lane,
        slot_bytes=slot,
        kind=_SIGNED_LEVELS,
        scales=DTYPES[dtype],
        bits=side.bits,
        size=2 * side.size,
    )


def _pointer(tensor: Tensor, dtype: torch.dtype, held: list[Tensor]) -> int:
    own = tensor.to(dtype=dtype).contiguous()
    held.append(own)
    return own.data_ptr()
