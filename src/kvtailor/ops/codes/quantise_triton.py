"""Quantising and packing in one pass over states: the bytes, steps and minima that `ops.codes.sides` makes on a CPU.

torch divides by a number on a GPU as it multiplies by its inverse, so there its own steps may differ in the last bit.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.codes.quantise_kernels import channel_kernel, token_kernel
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.triton_launch import Launch, unfit

__all__ = ["channel_call", "channel_codes", "symmetric_codes", "token_call", "token_codes", "why_not_packed"]

# Elements of a program's tile.
_TILE = 4096


def why_not_packed(states: Tensor, bits: int, group: int | None = None) -> str | None:
    """Why the kernels cannot quantise these states; None where they can.

    Args:
        states: (m, s, c).
        bits: of a code.
        group: channels that share scales; None where runs of tokens do.
    """
    if bits not in (2, 4, 8):
        return f"codes of 2, 4 or 8 bits are written, found {bits}"
    if states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"states of 32 or 16 bits are read, found {states.dtype}"
    if states.stride(-1) != 1:
        return "the channels of a token must lie side by side in memory"
    width = packed_size(states.shape[-1], bits)
    if group is not None and states.shape[-1] % group:
        return f"{states.shape[-1]} channels do not make groups of {group}"
    if group not in (None, states.shape[-1]) and width % group and group % width:
        return f"groups of {group} channels cut across the {width} bytes of a token"
    return unfit(states.device, states.dtype)


def token_codes(states: Tensor, bits: int, group: int) -> TokenCodes:
    """`TokenCodes.of` for states (m, s, c) that `why_not_packed` found nothing against."""
    call, codes = token_call(states, bits, group)
    call()
    return codes


def symmetric_codes(states: Tensor, bits: int) -> TokenCodes:
    """`TokenCodes.symmetric` for states (m, s, c) that `why_not_packed` found nothing against."""
    call, codes = token_call(states, bits, states.shape[-1], symmetric=True)
    call()
    return codes


def channel_codes(states: Tensor, bits: int, group: int) -> ChannelCodes:
    """`ChannelCodes.of` for states (m, s, c) that `why_not_packed` found nothing against."""
    call, codes = channel_call(states, bits, group)
    call()
    return codes


def token_call(states: Tensor, bits: int, group: int, *, symmetric: bool = False) -> tuple[Launch, TokenCodes]:
    """The launch of `token_codes` or `symmetric_codes`, and what it writes."""
    lanes, slots, size = states.shape
    width, parts = packed_size(size, bits), 8 // bits
    # One group for all channels covers the padding of the last byte as well.
    per = width * parts if group == size else group
    piece = min(per, width)
    codes = states.new_empty((lanes, slots, width), dtype=torch.uint8)
    step = states.new_empty((lanes, slots, size // group))
    low = None if symmetric else torch.empty_like(step)
    most = 2 ** (bits - 1) - 1
    info = torch.finfo(states.dtype)
    padded = triton.next_power_of_2(piece) * triton.next_power_of_2(width // piece)
    tokens = max(1, _TILE // (padded * parts))
    call = Launch(
        kernel=token_kernel,
        grid=(triton.cdiv(lanes * slots, tokens),),
        arguments={
            "X": states,
            "CODES": codes,
            "STEP": step,
            "LOW": low,
            "count": lanes * slots,
            "slots": slots,
            "lane_stride": states.stride(0),
            "slot_stride": states.stride(1),
            "limit": min(info.max, torch.finfo(torch.float32).max) / max(1, most) * (1 - info.eps),
            "SIZE": size,
            "BITS": bits,
            "WIDTH": width,
            "PER": per,
            "GROUPS": size // group,
            "PIECE": piece,
            "PIECES": width // piece,
            "PIECE_PAD": triton.next_power_of_2(piece),
            "PIECES_PAD": triton.next_power_of_2(width // piece),
            "TOKENS": tokens,
            "SYMMETRIC": symmetric,
        },
        warps=4,
        stages=1,
    )
    return call, TokenCodes(bits=bits, size=size, codes=codes, step=step, low=low)


def channel_call(states: Tensor, bits: int, group: int) -> tuple[Launch, ChannelCodes]:
    """The launch of `channel_codes`, and what it writes."""
    lanes, slots, size = states.shape
    width, runs = packed_size(size, bits), -(-slots // group)
    codes = states.new_empty((lanes, slots, width), dtype=torch.uint8)
    step = states.new_empty((lanes, runs, size))
    low = torch.empty_like(step)
    padded = triton.next_power_of_2(group)
    channels = min(triton.next_power_of_2(width), max(16, _TILE // (padded * (8 // bits))))
    call = Launch(
        kernel=channel_kernel,
        grid=(lanes * runs, triton.cdiv(width, channels)),
        arguments={
            "X": states,
            "CODES": codes,
            "STEP": step,
            "LOW": low,
            "slots": slots,
            "runs": runs,
            "lane_stride": states.stride(0),
            "slot_stride": states.stride(1),
            "SIZE": size,
            "BITS": bits,
            "WIDTH": width,
            "GROUP": group,
            "GROUP_PAD": padded,
            "CHANNELS": channels,
        },
        warps=4,
        stages=1,
    )
    return call, ChannelCodes(group=group, bits=bits, size=size, codes=codes, step=step, low=low)
