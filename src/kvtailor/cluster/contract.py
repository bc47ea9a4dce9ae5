"""What an executor is: it runs calls with the resources that they declare, and returns the outcome of each.

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
        cpus: processors. In a worker torch computes with so many threads (at least one).
        gpus: accelerators; fractions such as 0.5 are allowed.
        memory: bytes of the machine's memory; None: none is reserved.
        exclusive: no other call runs on the machine meanwhile, because this one measures time or memory.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None
    exclusive: bool = False

    def __str__(self) -> str:
        """Describe them in words, for the sentence of an error."""
        words = [f"{self.cpus:g} CPU{'s' if self.cpus != 1 else ''}"]
        words += [f"{self.gpus:g} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        words += [f"{self.memory} bytes of memory"] if self.memory else []
        return f"{', '.join(words)}{', with nothing else beside it' if self.exclusive else ''}"

    @property
    def threads(self) -> int:
        """Return with how many threads torch computes."""
        return max(1, int(self.cpus))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One piece of work.

    Attributes:
        function: importable by its name in another process. It may be started again after a failure, so running it
            twice must have the same result as running it once.
        arguments: can be pickled. Put what many calls have in common through `Executor.share`.
        resources: what it takes.
        tag: any object of the caller; it is returned with the outcome and sent to no worker.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    resources: Resources = field(default_factory=Resources)
    tag: Any = None


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """The result of a call, or why it has none.

    Attributes:
        call: the call.
        value: what the function returned; None where it failed.
        failure: why there is no value, one sentence; None where there is one.
        machine: short name of the machine where it ended; None: not known, such as after the worker's death.
        attempts: how often it was started.
    """

    call: Call
    value: Any = None
    failure: str | None = None
    machine: str | None = None
    attempts: int = 1


class Shared(ABC):
    """A value that many calls have in common, sent to each machine once."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return a name that is the same in every process, and different for every other shared value."""

    @abstractmethod
    def get(self) -> Any:
        """Return the value."""


class Executor(ABC):
    """Runs calls. Close it, or use it as a context manager; closing cancels calls that have not ended.

    Only one thread may submit and take. Calls end in any order.
    """

    @property
    @abstractmethod
    def pending(self) -> int:
        """Return how many calls were submitted whose outcomes have not been taken."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another call would start soon; submitting more only makes the queue longer."""

    @abstractmethod
    def share(self, value: Any) -> Shared:
        """Return what stands for a value in the arguments of calls."""

    @abstractmethod
    def submit(self, call: Call) -> None:
        """Queue a call, which starts as soon as its resources are free."""

    @abstractmethod
    def take(self) -> CallOutcome:
        """Wait for the next outcome and return it.

        A call that failed is started again, `ATTEMPTS` times in all, before its failure is returned.

        Raises:
            LookupError: no call is pending.
        """

    @abstractmethod
    def on_each_machine(self, function: Callable[..., Any], *arguments: Any, gpus: float = 0.0) -> list[CallOutcome]:
        """Run one call on each machine that takes calls now, beside whatever runs there, and return the outcomes.

        Args:
            function, arguments: see `Call`.
            gpus: fraction of an accelerator that the function needs; machines without one are left out.
        """

    @abstractmethod
    def why_not(self, resources: Resources) -> str | None:
        """Return why no machine of the cluster can run such a call, as one sentence; None if one can."""

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
    """Describe a call that failed at every attempt.

    Args:
        reasons: one for each attempt, in order.
    """
    different = list(dict.fromkeys(reason.rstrip(".") for reason in reasons))
    return f"It failed {len(reasons)} times: {'; then: '.join(different)}."
