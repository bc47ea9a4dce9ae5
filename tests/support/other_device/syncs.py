"""Counts of the moments at which the host waits for a device, by kind and by the line of ours that asked for it.

A GPU works through a queue of launched operations while Python is already further on. An operation whose result Python
must know (`item`), or whose output has a size that depends on numbers (`nonzero`), empties that queue first: the GPU
then idles until Python has launched the next operation. A copy of ordinary memory between host and device does so too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kvtailor

__all__ = ["BETWEEN", "CHECK", "EQUAL", "FROM_HOST", "ITEM", "SIZE", "TO_HOST", "Syncs", "count_syncs", "note"]

# Kinds. All but BETWEEN make the host wait.
ITEM = "item"  # one number is read: item(), bool(), int(), float(), `if tensor`
EQUAL = "equal"  # torch.equal
SIZE = "size from numbers"  # nonzero, unique, masks as indices, repeat_interleave without a size
CHECK = "check of a decomposition"  # linalg reads on the host whether its algorithm has converged
TO_HOST = "copy to host"  # cpu(), tolist(), numpy(), copy_ into a tensor of the CPU
FROM_HOST = "copy from host"  # to(device), torch.tensor(..., device=...), an index tensor of the CPU
BETWEEN = "copy between devices"  # from one index to another: the devices wait for each other, the host does not

_HERE = Path(__file__).parent
_OURS = str(Path(kvtailor.__file__).parent)


@dataclass
class Syncs:
    """What was counted.

    Attributes:
        found: how often, by kind and place; a place is "engine/evict.py:120 score_layer", a file below `src/kvtailor`,
            its line and the function; or "(generation/utils.py:2975)" where no frame of the stack is kvtailor's.
    """

    found: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How often the host waited; copies between devices do not count."""
        return sum(count for (kind, _), count in self.found.items() if kind != BETWEEN)

    @property
    def by_kind(self) -> Counter[str]:
        return self._by(0)

    @property
    def by_place(self) -> Counter[str]:
        return self._by(1)

    def ours(self) -> int:
        """How often a line of kvtailor made the host wait."""
        return sum(count for (kind, place), count in self.found.items() if kind != BETWEEN and place[0] != "(")

    def table(self) -> str:
        """One line for each kind and place, most frequent first; for the message of a failed test."""
        return "\n".join(f"{count:6} {kind:24} {place}" for (kind, place), count in self.found.most_common())

    def _by(self, part: int) -> Counter[str]:
        total: Counter[str] = Counter()
        for key, count in self.found.items():
            total[key[part]] += count
        return total


_counting: list[Syncs] = []


@contextmanager
def count_syncs() -> Iterator[Syncs]:
    """Within it, every host synchronisation is counted, in this and in other threads."""
    syncs = Syncs()
    _counting.append(syncs)
    try:
        yield syncs
    finally:
        # By identity: two counts that found the same are equal.
        _counting[:] = [each for each in _counting if each is not syncs]


def note(kind: str, times: int = 1) -> None:
    """Counts what the caller of an operation asked for."""
    if _counting and times:
        place = _place()
        for syncs in _counting:
            syncs.found[kind, place] += times


def _place() -> str:
    """The innermost line of kvtailor on the stack; else, in parentheses, the innermost that is neither torch nor this
    folder."""
    frame, outside = sys._getframe(2), None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return f"{name[len(_OURS) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if outside is None and not name.startswith(str(_HERE)) and "/torch/" not in name and name[0] != "<":
            outside = f"({'/'.join(Path(name).parts[-2:])}:{frame.f_lineno})"
        frame = frame.f_back
    return outside or "(unknown)"
