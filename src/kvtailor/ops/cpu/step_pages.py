"""Which pages the tokens of a step read: addresses of all parts, and room for what is chosen of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from kvtailor.ops.cpu.choose import pages_of, side_of_rows, unsuited_best_pages
from kvtailor.ops.cpu.library import Call, Library
from kvtailor.ops.segments.best_pages import BestPages
from kvtailor.types import Segment

__all__ = ["StepPages", "unsuited"]


def unsuited(parts: Sequence[Segment], pages: BestPages) -> str | None:
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
