"""Stands for a cluster: calls run in this process, one after the other, when their outcome is taken."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtailor.cluster import CallOutcome, Executor, Resources

__all__ = ["InProcess", "Submitted"]


@dataclass(frozen=True, eq=False)
class Submitted:
    """A call as it was submitted."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    resources: Resources
    tag: Any


class InProcess(Executor):
    """Runs each call in this process, with all that the process has: declared resources reserve nothing here."""

    def __init__(self) -> None:
        self.calls: deque[Submitted] = deque()

    @property
    def pending(self) -> int:
        return len(self.calls)

    @property
    def has_room(self) -> bool:
        return not self.calls

    def share(self, value: Any) -> Any:
        return value

    def submit(
        self, function: Callable[..., Any], *arguments: Any, resources: Resources | None = None, tag: Any = None
    ) -> None:
        self.calls.append(Submitted(function, arguments, resources or Resources(), tag))

    def take(self) -> CallOutcome:
        return self.outcome_of(self.calls.popleft())

    def outcome_of(self, call: Submitted) -> CallOutcome:
        """Run a call."""
        try:
            return CallOutcome(tag=call.tag, value=call.function(*call.arguments), machine=platform.node())
        except Exception as error:
            return CallOutcome(tag=call.tag, failure=f"{type(error).__name__}: {error}", machine=platform.node())

    def on_each_machine(self, function: Callable[..., Any], *arguments: Any, gpus: float = 0.0) -> list[CallOutcome]:
        return [CallOutcome(value=function(*arguments), machine=platform.node())]

    def why_not(self, resources: Resources) -> str | None:
        return None

    def cancel(self) -> None:
        self.calls.clear()

    def close(self) -> None:
        self.cancel()
