"""The bench's tasks: what is asked of every plan, on the same tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject

__all__ = ["Given", "Task"]


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a task works with.

    Attributes:
        subject: the model.
        contestants: the plans, the null plan first.
        blank: a record of one plan with all that does not depend on the task; the task replaces what it measured.
        advance: called after each unit of work with the label of what runs.
        known: the finished record of an earlier run that measured exactly this, by the record that would be written but
            for its results; None where there is none. A task gives such a record back in place of measuring again.
    """

    subject: Subject
    contestants: Sequence[Contestant]
    blank: Callable[[Contestant], Record]
    advance: Callable[[str], None]
    known: Callable[[Record], Record | None] = lambda blank: None

    def known_together(self, blanks: Sequence[Record]) -> list[Record]:
        """The finished records of all these, where one run measured them all; else none.

        Times are comparable within one run only, so that all of them are known or none is.
        """
        found = [record for blank in blanks if (record := self.known(blank)) is not None]
        return found if len(found) == len(blanks) and len({record.run for record in found}) == 1 else []


class Task(ABC):
    """One question asked of all plans. A subclass is a frozen, keyword-only dataclass of its settings.

    Attributes:
        name: its name in records.
        version: raised whenever its numbers may change for the same model and plan.
    """

    name: ClassVar[str]
    version: ClassVar[int]

    def texts(self) -> dict[str, str]:
        """The texts that it scores, by the names under which they are reported; none where they are made."""
        return {}

    def cells(self, contestants: int) -> int:
        """How many records it gives."""
        return contestants

    @abstractmethod
    def units(self, contestants: int) -> int:
        """How often `advance` is going to be called at most."""

    @abstractmethod
    def measure(self, given: Given) -> Iterator[Record]:
        """Records of all contestants. A plan that fails gives a record with `error`, and the others go on.

        Raises:
            KvtailorError: the task itself cannot be done (a text too short, say), or a sanity check failed.
        """
