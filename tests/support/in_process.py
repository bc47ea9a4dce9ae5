"""An executor without a cluster: calls run in this process, one after the other, when their outcome is taken."""

from __future__ import annotations

import itertools
import platform
from collections import deque
from collections.abc import Callable
from typing import Any

from kvtailor.cluster.contract import ATTEMPTS, Call, CallOutcome, Executor, Resources, Shared, failed_often
from kvtailor.errors import ArgumentError

__all__ = ["InProcess"]

_NUMBERS = itertools.count()


class _Here(Shared):
    def __init__(self, value: Any):
        self._value, self._name = value, f"here-{next(_NUMBERS)}"

    @property
    def name(self) -> str:
        return self._name

    def get(self) -> Any:
        return self._value


class InProcess(Executor):
    """Runs each call in this process, with all that the process has: declared resources reserve nothing here."""

    def __init__(self) -> None:
        self._waiting: deque[Call] = deque()

    @property
    def pending(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return not self._waiting

    def share(self, value: Any) -> Shared:
        return _Here(value)

    def submit(self, call: Call) -> None:
        self._waiting.append(call)

    def take(self) -> CallOutcome:
        if not self._waiting:
            raise ArgumentError("asked for an outcome, but no call is pending: submit one first")
        call = self._waiting.popleft()
        reasons: list[str] = []
        while len(reasons) < ATTEMPTS:
            try:
                value = call.function(*call.arguments)
                return CallOutcome(call=call, value=value, machine=platform.node(), attempts=len(reasons) + 1)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
        return CallOutcome(call=call, failure=failed_often(reasons), machine=platform.node(), attempts=len(reasons))

    def on_each_machine(self, function: Callable[..., Any], *arguments: Any, gpus: float = 0.0) -> list[CallOutcome]:
        call = Call(function=function, arguments=arguments)
        return [CallOutcome(call=call, value=function(*arguments), machine=platform.node())]

    def why_not(self, resources: Resources) -> str | None:
        return None

    def close(self) -> None:
        self._waiting.clear()
