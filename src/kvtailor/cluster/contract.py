"""What an executor is: it runs calls with the resources that they declare, and tells what became of each.

An executor knows functions, arguments, processors and memory. It knows nothing of models, tasks or records, so that
the bench, and whatever else has many pieces of work, can run on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

__all__ = ["ATTEMPTS", "Call", "Executor", "CallOutcome", "Resources", "Shared", "failed_often"]

ATTEMPTS = 2
"""How often a call is tried: a worker that was killed by chance is no fault of the call; the second time it may be."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a call takes while it runs.

    Attributes:
        cpus: processors. In a worker, torch computes in so many threads (at least one), whatever the machine has.
        gpus: accelerators; a part of one may be asked for, such as 0.5.
        memory: bytes of the machine's memory; None: none is reserved.
        exclusive: a machine to itself, because the call times or weighs something: no other call runs there meanwhile.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None
    exclusive: bool = False

    def __str__(self) -> str:
        """In words, for the sentence of an error."""
        words = [f"{self.cpus:g} CPU{'s' if self.cpus != 1 else ''}"]
        words += [f"{self.gpus:g} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        words += [f"{self.memory} bytes of memory"] if self.memory else []
        return f"{', '.join(words)}{', with nothing else beside it' if self.exclusive else ''}"

    @property
    def threads(self) -> int:
        """How many threads torch computes in."""
        return max(1, int(self.cpus))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One piece of work.

    Attributes:
        function: importable by its name in another process. It may be run again after it was begun, so running it
            twice must give what running it once gives.
        arguments: can be pickled. What many calls have in common goes through `Executor.share`.
        resources: what it takes.
        tag: of the caller; it comes back with the outcome and is not sent anywhere.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    resources: Resources = field(default_factory=Resources)
    tag: Any = None


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What became of a call.

    Attributes:
        call: the call.
        value: what the function returned; None where it failed.
        failure: why there is no value, one sentence; None where there is one.
        machine: where it ended, a short name; None where that is not known, as of a call whose worker died.
        attempts: how often it was begun.
    """

    call: Call
    value: Any = None
    failure: str | None = None
    machine: str | None = None
    attempts: int = 1


class Shared(ABC):
    """A value that many calls have in common: it travels to a machine once."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Equal for the same shared value in every process, and for no other one."""

    @abstractmethod
    def get(self) -> Any:
        """Return the value."""


class Executor(ABC):
    """Runs calls. To be closed, as a context manager does: what has not ended by then is cancelled.

    One thread submits and takes. Calls end in any order.
    """

    @property
    @abstractmethod
    def pending(self) -> int:
        """How many calls were submitted whose outcomes have not been taken."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another call would soon be begun; who submits beyond that only makes a queue longer."""

    @abstractmethod
    def share(self, value: Any) -> Shared:
        """Return what stands for a value in the arguments of calls."""

    @abstractmethod
    def submit(self, call: Call) -> None:
        """Begin a call as soon as its resources are free."""

    @abstractmethod
    def take(self) -> CallOutcome:
        """Return the next outcome, and wait for it.

        A call that failed is begun once more (`ATTEMPTS`), and only then is it an outcome with a failure.

        Raises:
            LookupError: no call is pending.
        """

    @abstractmethod
    def on_each_machine(self, function: Callable[..., Any], *arguments: Any, gpus: float = 0.0) -> list[CallOutcome]:
        """Return the outcomes of one call on each machine that takes calls now, beside whatever runs there.

        Args:
            function, arguments: see `Call`.
            gpus: a small part of an accelerator, for a function that looks at one; machines without are left out.
        """

    @abstractmethod
    def why_not(self, resources: Resources) -> str | None:
        """Return why no machine that is there now can run such a call, one sentence; None where one can."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what has not ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def failed_often(reasons: list[str]) -> str:
    """Return the sentence of a call that failed as often as it may.

    Args:
        reasons: one for each attempt, in their order.
    """
    different = list(dict.fromkeys(reason.rstrip(".") for reason in reasons))
    return f"It failed {len(reasons)} times: {'; then: '.join(different)}."
