"""New tokens written behind the filled slots of a lane, whose number is read on the device: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["append_kernel"]


@triton.jit
def append_kernel(
    STATES, INTO, LENGTHS, capacity, lane_stride, slot_stride, NEW: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr
):
    """The NEW tokens of one lane behind those that LENGTHS (m,) counts; what is past the capacity is not written.

    Args:
        STATES: (m, NEW, SIZE) contiguous. INTO: (m, capacity, SIZE) by strides.
    """
    lane = tl.program_id(0).to(tl.int64)
    new = tl.program_id(1)
    channel = tl.arange(0, PAD)
    slot = tl.load(LENGTHS + lane) + new
    states = tl.load(STATES + (lane * NEW + new) * SIZE + channel, mask=channel < SIZE, other=0.0)
    mask = (channel < SIZE) & (slot + tl.zeros([PAD], tl.int32) < capacity)
    tl.store(INTO + lane * lane_stride + slot * slot_stride + channel, states, mask=mask)
