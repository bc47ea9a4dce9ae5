"""One decoded token of each row at one layer, in one call of C++.

All that stays the same from token to token (addresses, strides, tables of scales, lengths) is worked out once. A call
then writes the token into the tail's next free slot, reads all parts as they are stored, and merges them by one
softmax. The general form of the same is `ops.attention.parts`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.attention.cpu.choose import pages_of, side_of_rows, unsuited_best_pages
from kvtailor.ops.attention.cpu.sides import (
    magnitudes_of,
    map_of,
    offset_of,
    side_of,
    turn_of,
    unsuited,
    unsuited_turned,
)
from kvtailor.ops.cpu.library import DTYPES, Call, Ends, Library, Offset, PartCoordinates, Step, library
from kvtailor.ops.segments.attention_inputs import BestPages
from kvtailor.ops.segments.coded import layout_of
from kvtailor.ops.segments.sides import stored_sides
from kvtailor.types import Coordinates, PlainSegment, Segment

__all__ = ["WORKSPACE", "StepPages", "unsuited_pages", "TokenStep"]


class _Workspace(threading.local):
    """Scratch of a thread's steps: of no cache, and as large as the largest has needed.

    Attributes:
        mark: another object whenever the scratch lies elsewhere. Steps keep it in place of the scratch, which would
            else be memory that their cache holds.
    """

    floats: Tensor = torch.empty(0, dtype=torch.float32)
    mark: object = None

    def at(self, count: int) -> int:
        """Address of so many floats."""
        if self.mark is None or self.floats.numel() < count:
            self.floats, self.mark = torch.empty(count, dtype=torch.float32), object()
        return self.floats.data_ptr()


WORKSPACE = _Workspace()


def unsuited_pages(parts: Sequence[Segment], pages: BestPages) -> str | None:
    """Return why the best pages of these parts cannot be read by steps, a clause; None where they can."""
    if any(part.layout.owner is not None or part.layout.lengths is not None for part in parts):
        return "heads hold different numbers of tokens"
    if pages.bounds[-1] is not None:
        return "the tail has no pages"
    return unsuited_best_pages([part.decode() for part in parts], pages.bounds)


class StepPages:
    """The pages, of which a step chooses anew for each token.

    Args:
        parts: of the step, one lane for each owner, in time order; the last is the tail.
        pages: of these parts; see `unsuited`.
        group: g, query heads of a kv head.
        scaling, softcap: of the step.

    Attributes:
        choice: as C++ sees it.
        call: over the tokens that are chosen.
    """

    def __init__(
        self, parts: Sequence[Segment], pages: BestPages, *, group: int, scaling: float, softcap: float | None
    ):
        states = [part.decode() for part in parts]
        self.choice, self._tables = pages_of(states, pages, group)
        # The tail's slots are counted as they are filled.
        self._fixed = self.choice.room - parts[-1].layout.size
        keys, values = map(side_of_rows, states[0])
        self.call = call = Call(keys=keys, values=values)
        call.owners = call.lanes = self.choice.owners
        call.slots, call.rows, call.queries = self.choice.room, group, 1
        call.scaling, call.softcap = scaling, softcap or 0.0

    def moves_to(self, keys: Tensor, values: Tensor) -> None:
        """Go on where the tail has other buffers, (b * h, slots, d) and (b * h, slots, dv)."""
        tables, element = self._tables[0], keys.element_size()
        for name, of, each in (("keys", "key", keys), ("values", "value", values)):
            tables[name][-1] = each.data_ptr()
            tables[f"{of}_lane"][-1], tables[f"{of}_slot"][-1] = (stride * element for stride in each.stride()[:2])

    def rooms(self, slots: int, threads: int, using: Library) -> Iterator[tuple[list[tuple[Any, str]], int]]:
        """Yield what needs the address of room for so many floats, for a tail of so many slots."""
        choice, call = self.choice, self.call
        call.slots, choice.threads = self._fixed + slots, threads
        # An address is as long as two floats.
        table = 2 * choice.owners * call.slots
        yield [(choice, "key_rows"), (call.keys, "data"), (call.keys, "low")], table
        yield [(choice, "value_rows"), (call.values, "data"), (call.values, "low")], table
        yield [(choice, "lengths"), (call, "lengths")], choice.owners
        yield [(choice, "scratch")], using.functions.kvtailor_pages_scratch(ctypes.byref(choice))


class TokenStep:
    """Takes tokens of one layer, one after the other.

    It has addresses of what it reads and writes, and keeps none of it: who calls it has to.

    Args:
        parts: (m, s) lanes each, in time order. The last is the tail: the filled slots of `keys` and `values`, lane i
            of owner i, at least one.
        sees: for each part which of its slots these tokens see, bool that broadcasts to (m, 1, s); None: all. Every
            token sees those that joined after it was made.
        keys, values: buffers (b * h, slots, d) and (b * h, slots, dv) of the tail.
        positions: (b * h, slots) int32 columns of its slots; None where they are consecutive.
        query_heads: q.
        scaling: factor before the softmax.
        softcap: see `Softmax`.
        mass: what the slots receive is wanted as well.
        using: the variant.
        pages: of which each token reads the best; None: it reads everything.
        given: float32 where queries, new keys and values, and the output are in it, and the tail is not; None: they are
            as the tail.
        ends: the tail, which is all there is, drops the oldest token behind its first ones with each that joins. Where
            these are turned to be read, they are a part of their own. Who calls says by how much, in `ends`.

    Attributes:
        chooses: whether it reads chosen pages.
        complete: whether it can be used. If not, a part would have to be copied to be read, or a lane hides slots
            behind one that is seen; or some at all, where pages are chosen.
    """

    def __init__(
        self,
        parts: Sequence[Segment],
        sees: Sequence[Tensor | None],
        keys: Tensor,
        values: Tensor,
        positions: Tensor | None,
        *,
        query_heads: int,
        scaling: float,
        softcap: float | None,
        mass: bool,
        using: Library,
        pages: BestPages | None = None,
        ends: Ends | None = None,
        given: torch.dtype | None = None,
    ):
        layout = parts[-1].layout
        rows, heads, size, value_size = layout.rows, layout.heads, keys.shape[-1], values.shape[-1]
        group = query_heads // heads
        self.dtype, self._using, self._owners, self._group = given or keys.dtype, using, rows * heads, group
        self.key_shape, self.value_shape = (rows, heads, 1, size), (rows, heads, 1, value_size)
        self.query_shape, self._out_shape = (rows, query_heads, 1, size), (rows, 1, query_heads, value_size)
        self.scaling, self.softcap, self.threads = scaling, softcap, torch.get_num_threads()
        self.complete, self._numbers, self.chooses = True, list[Any](), pages is not None
        # Channels of a query or a sum on its way through coordinates.
        self._widest, self._offsets = [size, value_size], list[Offset]()
        self._calls, maps = list[Call](), list[PartCoordinates]()
        self._pages: StepPages | None = None
        if pages is not None:
            self._pages = StepPages(parts, pages, group=group, scaling=scaling, softcap=softcap)
            self.complete = all(seen is None for seen in sees)
            self._calls.append(self._pages.call)
            maps.append(PartCoordinates())
        for part, seen in () if pages is not None else zip(parts, sees, strict=True):
            call, coordinates = self._part(part, rows * heads, group)
            self._calls.append(call)
            maps.append(coordinates)
            self._hide(call, seen)
        pointers = [ctypes.addressof(call) for call in self._calls]
        self._parts = (ctypes.c_void_p * len(pointers))(*pointers)
        self._coordinates = (PartCoordinates * len(maps))(*maps)
        self._step = Step(
            parts=ctypes.addressof(self._parts),
            parallel_for=using.parallel_for,
            coordinates=ctypes.addressof(self._coordinates),
            count=len(maps),
            rows=rows,
            heads=heads,
            group=group,
            size=size,
            value_size=value_size,
            kind=DTYPES[keys.dtype],
            given=DTYPES[self.dtype],
            threads=1 if using.parallel_for is None else self.threads,
            widest=max(self._widest),
            pages=None if self._pages is None else ctypes.addressof(self._pages.choice),
        )
        self._at, self._run = ctypes.byref(self._step), using.functions.kvtailor_step
        self._strides: tuple[Any, ...] = ()
        self._mass = self._ready_for_mass(parts) if mass else ()
        self._ends, self._element_size = ends, keys.element_size()
        if ends is not None:
            self._step.ends = ctypes.addressof(ends)
        self._write_into(keys, values, positions)
        self._lay_out()

    @staticmethod
    def unsuited(
        parts: Sequence[Segment], *, mass: bool, pages: BestPages | None = None, given: torch.dtype | None = None
    ) -> str | None:
        """Return why these parts cannot be read so, a clause; None where they can.

        Args:
            parts, pages, given: see `TokenStep`.
            mass: whether what the slots receive is wanted as well.
        """
        if library() is None:
            return "no C++ kernels were built"
        for part in parts:
            own = stored_sides(part)
            if own is None:
                return f"{type(part).__name__} is decoded to be read"
            if own.shifts_logits or (mass and own.joined > 1):
                return f"{type(part).__name__} has logits or lanes that are no kv head's"
            why = unsuited(own.keys, own.values)
            if why is None and own.turned is not None:
                why = unsuited_turned(own.keys)
            if why is not None:
                return why
        tail = parts[-1]
        if not isinstance(tail, PlainSegment) or tail.layout.owner is not None or tail.layout.lengths is not None:
            return "the last part is no tail"
        return None if pages is None else unsuited_pages(parts, pages)

    def moves_to(self, tail: Sequence[PlainSegment], keys: Tensor, values: Tensor, positions: Tensor | None) -> None:
        """Go on where the tail has other buffers, of the same tokens.

        Args:
            tail: the filled slots, as the last of the parts that it was made of; with `ends`, all of these.
            keys, values, positions: as they were given when it was made.
        """
        if self._pages is not None:
            self._pages.moves_to(keys, values)
        else:
            for i, part in enumerate(tail, len(self._calls) - len(tail)):
                call, _ = self._part(part, self._owners, self._group)
                call.firsts, call.slots = self._calls[i].firsts, part.layout.size
                self._calls[i], self._parts[i] = call, ctypes.addressof(call)
        self._write_into(keys, values, positions)
        self._lay_out()

    def exchange(self, index: int, part: Segment) -> None:
        """Go on with another part in the place of one that is not the tail, which tokens see all of.

        `complete` says whether it can be read where it lies.

        Args:
            index: of the part, among those that it was made of.
            part: of the same encoding, with as many lanes and no more slots.
        """
        call, self._coordinates[index] = self._part(part, self._owners, self._group)
        self._calls[index], self._parts[index] = call, ctypes.addressof(call)
        self._lay_out()

    def takes(self, keys: Tensor, values: Tensor) -> bool:
        """Whether new keys (b, h, 1, d) and values (b, h, 1, dv) are of the shape and dtype that it was made for."""
        return (
            keys.shape == self.key_shape
            and values.shape == self.value_shape
            and keys.dtype is self.dtype
            and values.dtype is self.dtype
            and keys.device.type == values.device.type == "cpu"
        )

    def asks(self, query: Tensor) -> bool:
        """Whether a query (b, q, 1, d) is of the shape and dtype that it was made for."""
        return query.shape == self.query_shape and query.dtype is self.dtype and query.device.type == "cpu"

    def take(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        slot: int,
        column: int,
        sinks: Tensor | None = None,
        before: Sequence[Tensor] = (),
        tokens_read: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Write one token of each row into the tail, and return its attention (b, 1, q, dv) over all parts, and masses.

        These are what the slots of each part have received in all, (m, s) float32 with the new slot; none where no mass
        is wanted.

        Args:
            query: (b, q, 1, d). keys: (b, h, 1, d). values: (b, h, 1, dv).
            slot: of the tail, free. column: of the token.
            sinks: (q,) float32; None: none.
            before: for each part (m, s) float32 what its slots have received, where mass is wanted. The tail's may have
                fewer slots, or not be there.
            tokens_read: (b, h) int64 for how many tokens were read, where pages are chosen.

        Raises:
            RuntimeError: torch's threads refused the work.
        """
        step, strides = self._step, (query.stride(), keys.stride(), values.stride())
        if strides != self._strides:
            if not strides[0][3] == strides[1][3] == strides[2][3] == 1:
                query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
                strides = (query.stride(), keys.stride(), values.stride())
            element = query.element_size()
            (step.query_row, step.query_head), (step.key_row, step.key_head), (step.value_row, step.value_head) = (
                (each[0] * element, each[1] * element) for each in strides
            )
            self._strides = strides
        # Kept alive until the call is over.
        received, *_before = self._give_mass(slot + 1, before) if self._mass else ((),)
        if WORKSPACE.mark is not self._mark:
            self._point(WORKSPACE.at(self._floats))
        out = torch.empty(self._out_shape, dtype=self.dtype)
        step.query, step.key, step.value = query.data_ptr(), keys.data_ptr(), values.data_ptr()
        step.out, step.slot, step.column = out.data_ptr(), slot, column
        step.sinks = None if sinks is None else sinks.data_ptr()
        if tokens_read is not None:
            step.tokens_read = tokens_read.data_ptr()
        if self._run(self._at):
            raise RuntimeError("torch_parallel_for refused to run kvtailor's attention kernel")
        return out, received

    def _write_into(self, keys: Tensor, values: Tensor, positions: Tensor | None) -> None:
        """New tokens go into these buffers."""
        step, element = self._step, keys.element_size()
        self.slots = keys.shape[1]
        step.tail_keys, step.tail_values = keys.data_ptr(), values.data_ptr()
        step.tail_key_lane, step.tail_key_slot = (each * element for each in keys.stride()[:2])
        step.tail_value_lane, step.tail_value_slot = (each * element for each in values.stride()[:2])
        step.positions = None if positions is None else positions.data_ptr()
        step.position_lane = 0 if positions is None else positions.stride(0)

    def _ready_for_mass(self, parts: Sequence[Segment]) -> tuple[Any, ...]:
        """Arrays of addresses for each part, and the room that their weights take."""
        owners = self._step.rows * self._step.heads
        self._counts = (ctypes.c_float * owners)(*[1.0] * owners)
        self._step.counts = ctypes.addressof(self._counts)
        pointers, numbers = ctypes.c_void_p * len(parts), ctypes.c_int64 * len(parts)
        masses, before, slots_before = pointers(), pointers(), numbers()
        self._step.masses, self._step.before = ctypes.addressof(masses), ctypes.addressof(before)
        self._step.slots_before = ctypes.addressof(slots_before)
        return masses, before, slots_before

    def _give_mass(self, slots: int, before: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        masses, pointers, counts = self._mass
        last = len(self._calls) - 1
        made, kept = [], []
        for i, call in enumerate(self._calls):
            mass = torch.empty((call.lanes, slots if i == last else call.slots), dtype=torch.float32)
            was = before[i].contiguous() if i < len(before) else None
            masses[i], pointers[i] = mass.data_ptr(), None if was is None else was.data_ptr()
            counts[i] = 0 if was is None else was.shape[1]
            made.append(mass)
            kept.append(was)
        return tuple(made), kept

    def _part(self, part: Segment, owners: int, group: int) -> tuple[Call, PartCoordinates]:
        """How a part is read, and in which coordinates."""
        own, held = stored_sides(part), list[Tensor]()
        assert own is not None
        layout = own.layout
        call = Call()
        keys, values = layout_of(own.keys), layout_of(own.values)
        if keys.magnitudes is not None:
            call.key_magnitudes = magnitudes_of(keys, held, self._numbers)
        if values.magnitudes is not None:
            call.value_magnitudes = magnitudes_of(values, held, self._numbers)
        call.keys, call.values = side_of(keys, held, self._numbers), side_of(values, held, self._numbers)
        # The queries of heads that share a lane are the rows of one owner.
        call.owners, call.lanes, call.slots = owners // own.joined, layout.lanes, layout.size
        call.rows, call.queries = group * own.joined, 1
        call.scaling, call.softcap = self.scaling, self.softcap or 0.0
        # A query for keys that are turned stays as it is.
        turned, keys_in = own.turned, own.keys_in
        if turned is not None:
            keys_in = ()
            self._numbers.append(turn_of(turned, self.query_shape[-1], layout.size, held, self._numbers))
            call.turn = ctypes.addressof(self._numbers[-1])
        # Both are on the CPU, whatever they describe, and as long as the lanes are many.
        if own.offsetting is not None:
            self._offsets.append(offset_of(own.offsetting, None, held, self._numbers))
            call.offset = ctypes.addressof(self._offsets[-1])
        if layout.owner is not None:
            call.owner = self._kept(ctypes.c_int64, layout.owner)
        if layout.lengths is not None:
            call.lengths = self._kept(ctypes.c_int32, layout.lengths)
        if own.log_weight is not None:
            held.append(own.log_weight.contiguous())
            call.log_weight = held[-1].data_ptr()
        stored = {each.untyped_storage().data_ptr() for each in part.tensors().values()}
        self.complete &= all(each.untyped_storage().data_ptr() in stored for each in held)
        maps = PartCoordinates(
            keys=self._kept_maps(keys_in),
            values=self._kept_maps(own.values_in),
            keys_count=len(keys_in),
            values_count=len(own.values_in),
        )
        return call, maps

    def _kept_maps(self, maps: Sequence[Coordinates]) -> int | None:
        """Address of the addresses of these maps, which are kept; the codec has their tensors."""
        if not maps:
            return None
        made = [map_of(each) for each in maps]
        self._widest += [each.blocks * max(each.matrix.shape[1:]) for each in maps]
        pointers = (ctypes.c_void_p * len(made))(*map(ctypes.addressof, made))
        self._numbers += [*made, pointers]
        return ctypes.addressof(pointers)

    def _hide(self, call: Call, sees: Tensor | None) -> None:
        """Padding is on the left: of each lane the first slots are hidden, if any."""
        if sees is None or bool(sees.all()):
            return
        # (m, slots)
        seen = sees.expand(call.lanes, 1, call.slots)[:, 0]
        self.complete &= bool((seen[:, 1:] | ~seen[:, :-1]).all())
        call.firsts = self._kept(ctypes.c_int32, (~seen).sum(1))

    def _kept(self, number: Any, tensor: Tensor) -> int:
        """Address of as many numbers of this type, which are kept."""
        self._numbers.append((number * tensor.numel())(*tensor.tolist()))
        return ctypes.addressof(self._numbers[-1])

    def _lay_out(self) -> None:
        """Work out where in the workspace each part finds its room, in floats."""
        step, functions = self._step, self._using.functions
        queries, at = step.rows * step.heads * step.group, 0
        self._places: list[tuple[Any, str, int]] = []

        def room(of: Any, name: str, floats: int, *others: tuple[Any, str]) -> None:
            nonlocal at
            self._places += [(of, name, at), *((*each, at) for each in others)]
            # Whole cache lines, so that threads do not write into one another's.
            at += (floats + 15) // 16 * 16

        room(step, "asked", queries * step.size)
        room(step, "merged", max(step.value_size + step.count, step.size))
        if self._pages is not None:
            for (first, *others), floats in self._pages.rooms(self.slots, step.threads, self._using):
                room(*first, floats, *others)
        ends, keys = self._ends, self._calls[0].keys
        if ends is not None and ends.planes:
            # Keys that are turned lie one behind the other, of the tail's type, whatever the model gives.
            keys.slot_bytes = step.size * self._element_size
            keys.lane_bytes = ends.first * keys.slot_bytes
            room(ends, "turned", step.rows * step.heads * keys.lane_bytes // 4 + 1)
        for call in self._calls:
            call.threads = step.threads
            room(call, "out", queries * int(call.values.size))
            room(call, "lse", queries)
            at_call = ctypes.byref(call)
            room(call, "found", functions.kvtailor_found_of_any(at_call, ctypes.c_int64(step.threads)))
            room(call, "scratch", functions.kvtailor_scratch(at_call))
            if self._mass:
                # As many as the tail may come to have.
                slots, call.slots = call.slots, self.slots if call is self._calls[-1] else call.slots
                room(call, "kept", functions.kvtailor_kept(at_call))
                call.slots = slots
        if self._mass:
            room(step, "lse", queries)
        for call, own in zip(self._calls, self._coordinates, strict=True):
            if own.keys_count:
                room(own, "query", queries * int(call.keys.size))
            if own.values_count:
                room(own, "sums", queries * int(call.values.size))
                room(own, "out", queries * step.value_size)
            if own.keys_count or own.values_count:
                room(own, "between", 2 * step.widest)
        self._floats = at
        self._point(WORKSPACE.at(at))

    def _point(self, base: int) -> None:
        self._mark = WORKSPACE.mark
        for of, name, at in self._places:
            setattr(of, name, base + 4 * at)
        for call, own in zip(self._calls, self._coordinates, strict=True):
            call.query = own.query if own.keys_count else self._step.asked
        for offset in self._offsets:
            offset.query = self._step.asked
        if self._pages is not None:
            self._pages.choice.query = self._step.asked
        if self._ends is not None and self._ends.planes:
            self._calls[0].keys.data = self._ends.turned
