"""Calls on the machines of a Ray cluster.

Each call is a Ray task with its resources declared; Ray decides where it runs. An exclusive call is given all CPUs of
one machine, of which no other call can then have any: that needs nothing of how the cluster was started. Where some
machines offer the custom resource `kvtailor_exclusive`, exclusive calls run on those alone.

Ray repeats nothing by itself (`max_retries=0`), so that this file alone counts how often a call was begun.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    TaskCancelledError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtailor.cluster.contract import ATTEMPTS, Call, CallOutcome, Executor, Resources, Shared, failed_often
from kvtailor.cluster.ray_worker import InObjectStore, WorkerReply, answer
from kvtailor.errors import ArgumentError

__all__ = ["EXCLUSIVE", "OnRay"]

EXCLUSIVE = "kvtailor_exclusive"
"""The custom resource by which a cluster names the machines that time and weigh."""
_POLL = 2.0
_MOST_AHEAD = 10_000
# Share of the time that looking at the machines may take.
_MOST_LOOKING = 0.02
_LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A machine that takes calls, with all that it offers, free or not."""

    id: str
    host: str
    cpus: float
    gpus: float
    memory: float
    marked: bool

    def fits(self, asked: Resources) -> bool:
        return self.cpus >= asked.cpus and self.gpus >= asked.gpus and self.memory >= (asked.memory or 0)


@dataclass(kw_only=True)
class _Begun:
    """A call that is not over: its reference once Ray has it, why it failed before, and the machine kept for it."""

    call: Call
    reference: Any = None
    reasons: list[str] = field(default_factory=list)
    node: str | None = None


class OnRay(Executor):
    """Runs calls on the Ray cluster that this process is connected to.

    Args:
        disconnect: leave the cluster at the end (and end it, where this process started it).
        ahead: calls that are given to Ray for each CPU of the cluster, so that a worker that ends one finds another.
        patience: seconds after which a call that no machine could run fails; a cluster may grow, or mend itself.
    """

    def __init__(self, *, disconnect: bool = False, ahead: float = 2.0, patience: float = 300.0):
        self._disconnect, self._ahead, self._patience = disconnect, ahead, patience
        # Ray's default for tasks with accelerators is a new process for each, which would load the model each time.
        self._remote = ray.remote(max_retries=0, max_calls=0)(answer)
        self._numbers = itertools.count()
        self._begun: dict[int, _Begun] = {}
        self._waiting: deque[int] = deque()
        self._kept_for: dict[str, int] = {}
        self._ended: SimpleQueue[tuple[int, Future[WorkerReply]]] = SimpleQueue()
        self._look_again, self._nodes = 0.0, list[_Node]()
        self._unfit_since: dict[Resources, float] = {}

    @property
    def pending(self) -> int:
        return len(self._begun)

    @property
    def has_room(self) -> bool:
        cpus = sum(node.cpus for node in self._machines())
        return self.pending < min(_MOST_AHEAD, max(4, self._ahead * cpus))

    def share(self, value: Any) -> Shared:
        return InObjectStore(ray.put(value))

    def submit(self, call: Call) -> None:
        number = next(self._numbers)
        self._begun[number] = _Begun(call=call)
        self._begin(number)

    def take(self) -> CallOutcome:
        if not self._begun:
            raise ArgumentError("asked for an outcome, but no call is pending: submit one first")
        while True:
            try:
                number, future = self._ended.get(timeout=_POLL)
            except Empty:
                # Machines may have come or gone.
                self._place()
                hopeless = self._hopeless()
                if hopeless is not None:
                    return hopeless
                continue
            outcome = self._settled(number, future)
            self._place()
            if outcome is not None:
                return outcome

    def on_each_machine(self, function: Callable[..., Any], *arguments: Any, gpus: float = 0.0) -> list[CallOutcome]:
        call = Call(function=function, arguments=arguments)
        machines = [node for node in self._machines(fresh=True) if node.gpus >= gpus]
        asked = []
        for node in machines:
            options = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": _on(node.id)}
            asked.append((node, self._remote.options(**options).remote(function, arguments, None)))
        found = []
        for node, reference in asked:
            try:
                told: WorkerReply = ray.get(reference, timeout=self._patience)
                found.append(CallOutcome(call=call, value=told.value, failure=told.failure, machine=told.machine))
            except (NodeDiedError, TaskUnschedulableError):
                # It left the cluster meanwhile.
                continue
            except RayError as error:
                found.append(CallOutcome(call=call, failure=_reason(error), machine=f"{node.host}/{node.id[:8]}"))
        return found

    def why_not(self, resources: Resources) -> str | None:
        machines = self._candidates(exclusive=resources.exclusive)
        if any(node.fits(resources) for node in machines):
            return None
        if not machines:
            return f"asked for {resources}, but no machine of the cluster has a CPU: start one with `ray start`"
        largest = max(machines, key=lambda node: (node.cpus, node.gpus))
        return (
            f"asked for {resources}, but no machine of the cluster has that much: of {len(machines)} the largest, "
            f"{largest.host}, has {largest.cpus:g} CPUs, {largest.gpus:g} GPUs and {largest.memory:.0f} bytes of "
            "memory. Ask for less, or start a larger one"
        )

    def close(self) -> None:
        for begun in self._begun.values():
            if begun.reference is not None:
                # A worker in the midst of a call does not look up before it is done: only force ends it.
                ray.cancel(begun.reference, force=True)
        self._begun.clear()
        self._waiting.clear()
        if self._disconnect:
            ray.shutdown()

    def _begin(self, number: int) -> None:
        if self._begun[number].call.resources.exclusive:
            self._waiting.append(number)
            self._place()
        else:
            self._send(number)

    def _place(self) -> None:
        """Give the exclusive calls that wait the machines that no other one has."""
        if not self._waiting:
            return
        # Who is free is found once, and not for each call that waits: both may be a thousand.
        free = [node for node in self._candidates(exclusive=True) if node.id not in self._kept_for]
        left: deque[int] = deque()
        while self._waiting and free:
            number = self._waiting.popleft()
            asked = self._begun[number].call.resources
            node = next((node for node in free if node.fits(asked)), None)
            if node is None:
                left.append(number)
                continue
            free.remove(node)
            self._kept_for[node.id] = number
            self._begun[number].node = node.id
            self._send(number, node)
        self._waiting = left + self._waiting

    def _send(self, number: int, node: _Node | None = None) -> None:
        begun = self._begun[number]
        asked = begun.call.resources
        options: dict[str, Any] = {"num_cpus": asked.cpus, "num_gpus": asked.gpus}
        if asked.memory is not None:
            options["memory"] = asked.memory
        if node is not None:
            # All of its CPUs: whatever else declares any waits until this call is over.
            options |= {"num_cpus": node.cpus, "scheduling_strategy": _on(node.id)}
            if node.marked:
                options["resources"] = {EXCLUSIVE: 1}
        begun.reference = self._remote.options(**options).remote(
            begun.call.function, begun.call.arguments, asked.threads
        )
        ended = self._ended
        # A callback instead of `ray.wait`, whose cost grows with the calls that are out.
        begun.reference.future().add_done_callback(lambda future: ended.put((number, future)))

    def _settled(self, number: int, future: Future[WorkerReply]) -> CallOutcome | None:
        """What became of a call; None where it is begun again, or was given up before."""
        begun = self._begun.get(number)
        if begun is None:
            return None
        kept, begun.node = begun.node, None
        if kept is not None:
            self._kept_for.pop(kept, None)
        error = future.exception()
        if isinstance(error, TaskUnschedulableError | NodeDiedError):
            self._nodes = [node for node in self._nodes if node.id != kept]
        if isinstance(error, TaskUnschedulableError):
            # The machine that was kept for it is gone: the call had not begun.
            self._begin(number)
            return None
        if error is not None and not isinstance(error, RayError):
            raise error
        told = None if error is not None else future.result()
        if told is not None and told.moved:
            self._begin(number)
            return None
        machine = None if told is None else told.machine
        if told is not None and told.failure is None:
            del self._begun[number]
            return CallOutcome(call=begun.call, value=told.value, machine=machine, attempts=len(begun.reasons) + 1)
        where = f" (on {machine})" if machine is not None else ""
        begun.reasons.append(f"{told.failure if told is not None else _reason(error)}{where}")
        if len(begun.reasons) < ATTEMPTS:
            self._begin(number)
            return None
        del self._begun[number]
        return CallOutcome(
            call=begun.call, failure=failed_often(begun.reasons), machine=machine, attempts=len(begun.reasons)
        )

    def _hopeless(self) -> CallOutcome | None:
        """A call that no machine could run for longer than patience allows, as one that failed."""
        now = time.monotonic()
        for asked in {begun.call.resources for begun in self._begun.values()}:
            if self.why_not(asked) is None:
                self._unfit_since.pop(asked, None)
            else:
                self._unfit_since.setdefault(asked, now)
        for number, begun in self._begun.items():
            asked = begun.call.resources
            if now - self._unfit_since.get(asked, now) >= self._patience:
                del self._begun[number]
                if number in self._waiting:
                    self._waiting.remove(number)
                elif begun.reference is not None:
                    ray.cancel(begun.reference, force=True)
                why = f"For {self._patience:.0f} seconds no machine could run it: {self.why_not(asked)}."
                return CallOutcome(call=begun.call, failure=why, attempts=len(begun.reasons))
        return None

    def _candidates(self, *, exclusive: bool) -> Sequence[_Node]:
        machines = self._machines()
        marked = [node for node in machines if node.marked] if exclusive else []
        return marked or machines

    def _machines(self, *, fresh: bool = False) -> list[_Node]:
        """The machines with CPUs, as they were a moment ago: to look costs more, the more there are."""
        now = time.monotonic()
        if fresh or now >= self._look_again:
            self._nodes = [_node(each) for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU")]
            self._look_again = time.monotonic() + max(_POLL, (time.monotonic() - now) / _MOST_LOOKING)
        return self._nodes


def _node(told: dict[str, Any]) -> _Node:
    offered = told["Resources"]
    return _Node(
        id=told["NodeID"],
        host=told["NodeManagerHostname"],
        cpus=offered["CPU"],
        gpus=offered.get("GPU", 0.0),
        memory=offered.get("memory", 0.0),
        marked=EXCLUSIVE in offered,
    )


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _reason(error: BaseException | None) -> str:
    """Why a call was not answered, in one line."""
    first = str(error).strip().split("\n", 1)[0][:_LONGEST_REASON]
    if isinstance(error, OutOfMemoryError):
        return f"the machine ran low on memory and Ray ended the worker: {first}"
    if isinstance(error, NodeDiedError):
        return f"its machine left the cluster: {first}"
    if isinstance(error, WorkerCrashedError):
        return "its worker process died: it was killed (by the kernel, where memory ran out), or it crashed"
    if isinstance(error, TaskCancelledError):
        return "it was cancelled"
    return f"{type(error).__name__}: {first}"
