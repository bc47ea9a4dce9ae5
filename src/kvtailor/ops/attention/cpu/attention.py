"""Attention of few queries over coded lanes, in C++: reads the small bytes once, and writes nothing but the answer.

`merge` makes one softmax over parts that were read one by one, by the sums that a decoded token's one call makes, bit
by bit. `ops.attention.folded.merge` is the same in torch, in nine operations for two parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.attention.cpu.sides import magnitudes_of, offset_of, pointer, side_of, turn_of
from kvtailor.ops.cpu.library import Call, Library, Turn, Union, library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import layout_of

__all__ = [
    "KeptWeights",
    "attend_coded",
    "attend_and_keep",
    "make_call",
    "run",
    "choose_threads",
    "merge",
    "unsuited_merge",
]


# The same numbers as in attention.cpp, where a step parts its calls itself.
# Slots of a piece of work are a multiple of it: below, what a piece finds is as large as what it reads.
_LEAST = 256
_PIECES = 8
# Below so many multiplications a barrier costs more than a second thread brings.
_SMALL = 1 << 19
_REFUSED = "torch_parallel_for refused to run kvtailor's attention kernel"


@dataclass(frozen=True)
class KeptWeights:
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
        self.call.lse, self.call.counts = pointer(lse, torch.float32, held), pointer(counts, torch.float32, held)
        self.call.mass = mass.data_ptr()
        if self.used.functions.kvtailor_mass(ctypes.byref(self.call)):
            raise RuntimeError(_REFUSED)
        return mass


def attend_coded(inputs: AttentionInputs, *, using: Library | None = None) -> tuple[Tensor, Tensor]:
    """Attention over all slots of one part, on the CPU; see `sides.unsuited` for what keys and values can be.

    Args:
        inputs: see `AttentionInputs`, which also says what is returned.
        using: the variant; None: the best.
    """
    call, held = make_call(inputs)
    return run(call, held, inputs.query.shape, using or library())


def attend_and_keep(inputs: AttentionInputs, *, using: Library | None = None) -> tuple[Tensor, Tensor, KeptWeights]:
    """As `attend_coded`, and the weights, of which mass can be made."""
    call, held = make_call(inputs)
    used = using or library()
    assert used is not None, "asked for a kernel that was not built"
    kept = torch.empty(used.functions.kvtailor_kept(ctypes.byref(call)), dtype=torch.float32)
    held.append(kept)
    call.kept = kept.data_ptr()
    return *run(call, held, inputs.query.shape, used), KeptWeights(call, held, used)


def make_call(inputs: AttentionInputs) -> tuple[Call, list[Tensor]]:
    """The arguments of a call, and the tensors that it points to."""
    keys, values = layout_of(inputs.keys), layout_of(inputs.values)
    owners, group, new, size = inputs.query.shape
    asked = inputs.query.reshape(owners, group * new, size).to(torch.float32).contiguous()
    held = [asked]
    call = Call(query=asked.data_ptr())
    call.made = made = list[Any]()
    if keys.magnitudes is not None:
        call.key_magnitudes = magnitudes_of(keys, held, made)
    if values.magnitudes is not None:
        call.value_magnitudes = magnitudes_of(values, held, made)
    call.keys, call.values = side_of(keys, held, made), side_of(values, held, made)
    lanes, slots, _ = values.codes.shape
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
        call.owner = pointer(inputs.owner, torch.int64, held)
    if inputs.lengths is not None:
        call.lengths = pointer(inputs.lengths, torch.int32, held)
    if inputs.log_weight is not None:
        call.log_weight = pointer(inputs.log_weight, torch.float32, held)
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
    choose_threads(call, used)
    out = torch.empty((owners, group, new, call.values.size), dtype=torch.float32)
    lse = torch.empty((owners, group, new), dtype=torch.float32)
    at = ctypes.byref(call)
    found = torch.empty(used.functions.kvtailor_found(at), dtype=torch.float32)
    scratch = torch.empty(used.functions.kvtailor_scratch(at), dtype=torch.float32)
    call.out, call.lse, call.found, call.scratch = (each.data_ptr() for each in (out, lse, found, scratch))
    if used.functions.kvtailor_attend(at):
        raise RuntimeError(_REFUSED)
    return out, lse


def choose_threads(call: Call, used: Library) -> None:
    """Say how many threads a call takes, and how many slots each piece of it has."""
    lanes, slots, threads = call.lanes, call.slots, 1
    alike = Turn.from_address(call.turn).alike if call.turn else 1
    if used.parallel_for is not None and lanes * slots * call.rows * call.keys.size > _SMALL:
        threads = torch.get_num_threads()
        call.parallel_for = used.parallel_for
    call.threads = threads
    each = -(-lanes // alike * slots // (_PIECES * threads))
    call.chunk = max(_LEAST, -(-min(each, slots) // _LEAST) * _LEAST)


def unsuited_merge(found: Sequence[tuple[Tensor, Tensor]]) -> str | None:
    """Why these parts cannot be merged here, a clause; None where they can."""
    if any(each.dtype != torch.float32 or each.device.type != "cpu" for part in found for each in part):
        return "the C++ kernels merge float32 on the CPU"
    return None


def merge(found: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None, used: Library) -> tuple[Tensor, Tensor]:
    """Attention over the union of what disjoint parts saw, from each part's out (..., dv) and lse (...) float32.

    Args:
        found: at least one part.
        sinks: logits that broadcast to lse, each of a slot with the value 0; None: none.
        used: the variant.
    """
    shape, size = found[0][1].shape, found[0][0].shape[-1]
    held = [(out.contiguous(), lse.contiguous()) for out, lse in found]
    calls = [Call(out=out.data_ptr(), lse=lse.data_ptr()) for out, lse in held]
    parts = (ctypes.c_void_p * len(calls))(*map(ctypes.addressof, calls))
    out, lse = torch.empty((*shape, size), dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    scratch = torch.empty(size + len(calls), dtype=torch.float32)
    own = None if sinks is None else sinks.to(torch.float32).expand(shape).contiguous()
    used.functions.kvtailor_merge(
        ctypes.byref(
            Union(
                parts=ctypes.addressof(parts),
                sinks=None if own is None else own.data_ptr(),
                merged=scratch.data_ptr(),
                out=out.data_ptr(),
                lse=lse.data_ptr(),
                count=len(calls),
                rows=lse.numel(),
                size=size,
            )
        )
    )
    return out, lse
