"""Attention of few queries over coded lanes, in C++: reads the small bytes once, and writes nothing but the answer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.cpu import magnitudes
from kvtailor.ops.cpu.library import Call, Library, Turn, library
from kvtailor.ops.cpu.offset import offset_of
from kvtailor.ops.cpu.sides import pointer, side_of
from kvtailor.ops.cpu.turned import turn_of
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import layout_of

__all__ = ["KeptWeights", "attend_coded", "attend_and_keep", "make_call", "run", "choose_threads"]

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
        call.key_magnitudes = magnitudes.address_of(keys, held, made)
    if values.magnitudes is not None:
        call.value_magnitudes = magnitudes.address_of(values, held, made)
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
