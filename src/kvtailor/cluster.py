"""Calls of functions on the machines of a Ray cluster, each with what it takes, and the outcome of each.

It knows functions, processors and memory, and nothing of models, tasks or records: the bench runs its cells on it. Each
call is a Ray task; Ray decides where it runs. An exclusive call is given all CPUs of one machine, of which no other
call can then have any: that needs nothing of how the cluster was started. Where some machines offer the custom resource
`kvtailor_exclusive`, exclusive calls run on those alone.

Ray repeats nothing (`max_retries=0`), since it would begin a call again for ever that takes more memory than a machine
has (decision 0018): who submits a call is told why it failed. Ray is imported once it is asked for.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Self

from kvtailor.errors import ArgumentError, KvtailorError

__all__ = ["EXCLUSIVE", "HERE", "CallOutcome", "Executor", "Resources", "answer", "connect"]

HERE = "here"
"""Stands for: the cluster that this machine belongs to, or else a new one of this machine alone."""
EXCLUSIVE = "kvtailor_exclusive"
"""The custom resource by which a cluster names the machines that time and weigh."""

_SECONDS_TO_CONNECT = 10.0
_POLL = 2.0
# Calls that are given to Ray for each CPU of the cluster, so that a worker that ends one finds another; and at most.
_AHEAD, _MOST_AHEAD = 2.0, 10_000
_LONGEST_REASON = 300
# Seconds that a worker process lives on that leaves, and until what it did not do is asked for again.
_UNTIL_GONE, _UNTIL_AGAIN = 0.2, 0.5


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

    def fit_into(self, offered: Mapping[str, float]) -> bool:
        """Whether a machine that offers so much, by Ray's names, can run the call."""
        cpus, gpus, memory = (offered.get(name, 0.0) for name in ("CPU", "GPU", "memory"))
        return cpus >= self.cpus and gpus >= self.gpus and memory >= (self.memory or 0)


_ONE_CPU = Resources()


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """The result of a call, or why it has none.

    Attributes:
        tag: what the call was submitted with.
        value: what the function returned; None where it failed.
        failure: why there is no value, without a full stop; None where there is one.
        machine: short name of the machine where it ended; None: not known, such as after the worker's death.
        hopeless: no machine could run it, so that it is of no use to submit it again.
    """

    tag: Any = None
    value: Any = None
    failure: str | None = None
    machine: str | None = None
    hopeless: bool = False


@dataclass(kw_only=True, eq=False)
class _Call:
    """A call that has no outcome: `reference` and `node` are Ray's, `unfit` is since when no machine could run it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    resources: Resources
    tag: Any
    reference: Any = None
    node: str | None = None
    unfit: float | None = None


class Executor:
    """Runs calls on the Ray cluster that this process is connected to, see `connect`.

    Close it, or use it as a context manager; closing cancels calls that have not ended. Only one thread may submit and
    take. Calls end in any order.

    Args:
        disconnect: leave the cluster at the end (and end it, where this process started it).
        patience: seconds after which a call that no machine could run fails; a cluster may grow, or mend itself.
    """

    def __init__(self, *, disconnect: bool = False, patience: float = 300.0):
        import ray

        self._ray, self._disconnect, self._patience = ray, disconnect, patience
        # Ray's default for tasks with accelerators is a new process for each, which would load the model each time.
        self._answer = ray.remote(max_retries=0, max_calls=0)(answer)
        self._calls: set[_Call] = set()
        self._waiting: list[_Call] = []
        self._ended: SimpleQueue[tuple[_Call, Future[CallOutcome | None] | None]] = SimpleQueue()
        self._look_again, self._nodes = 0.0, list[dict[str, Any]]()

    @property
    def pending(self) -> int:
        """Return how many calls were submitted whose outcomes have not been taken."""
        return len(self._calls)

    @property
    def has_room(self) -> bool:
        """Whether another call would start soon; submitting more only makes the queue longer."""
        cpus = float(sum(node["Resources"]["CPU"] for node in self._machines()))
        return len(self._calls) < min(_MOST_AHEAD, max(4.0, _AHEAD * cpus))

    def share(self, value: Any) -> Any:
        """Return what stands for a value among the arguments of calls, so that it is sent to each machine once."""
        return self._ray.put(value)

    def submit(
        self, function: Callable[..., Any], *arguments: Any, resources: Resources = _ONE_CPU, tag: Any = None
    ) -> None:
        """Queue a call, which starts as soon as its resources are free.

        Args:
            function: importable by its name in another process.
            arguments: can be pickled. What many calls have in common goes through `share`.
            resources: what it takes.
            tag: any object of the caller; it comes back with the outcome and is sent to no worker.
        """
        call = _Call(function=function, arguments=arguments, resources=resources, tag=tag)
        self._calls.add(call)
        self._waiting.append(call)
        self._send()

    def take(self) -> CallOutcome:
        """Wait for the next outcome and return it.

        Raises:
            ArgumentError: no call is pending.
        """
        if not self._calls:
            raise ArgumentError("asked for an outcome, but no call is pending: submit one first")
        while True:
            # Machines may have come, or be free again.
            self._send()
            try:
                call, future = self._ended.get(timeout=_POLL)
            except Empty:
                outcome = self._given_up()
            else:
                outcome = self._settled(call, future) if call in self._calls else None
            if outcome is not None:
                return outcome

    def on_each_machine(self, function: Callable[..., Any], *arguments: Any, gpus: float = 0.0) -> list[CallOutcome]:
        """Run one call on each machine that takes calls now, beside whatever runs there, and return the outcomes.

        Args:
            function, arguments: see `submit`.
            gpus: fraction of an accelerator that the function needs; machines without one are left out.
        """
        exceptions = self._ray.exceptions
        machines = [node for node in self._machines(fresh=True) if node["Resources"].get("GPU", 0.0) >= gpus]

        def ask(node: Mapping[str, Any]) -> Any:
            options = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": _on(node)}
            return self._answer.options(**options).remote(function, None, *arguments)

        found = []
        for node, reference in [(node, ask(node)) for node in machines]:
            try:
                while (outcome := self._ray.get(reference, timeout=self._patience)) is None:
                    time.sleep(_UNTIL_AGAIN)
                    reference = ask(node)
                found.append(outcome)
            except (exceptions.NodeDiedError, exceptions.TaskUnschedulableError):
                # It left the cluster meanwhile.
                continue
            except exceptions.RayError as error:
                machine = f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}"
                found.append(CallOutcome(failure=self._reason(error), machine=machine))
        return found

    def why_not(self, resources: Resources) -> str | None:
        """Return why no machine of the cluster can run such a call, as one sentence; None if one can."""
        machines = self._candidates(exclusive=resources.exclusive)
        if any(resources.fit_into(node["Resources"]) for node in machines):
            return None
        if not machines:
            return f"asked for {resources}, but no machine of the cluster has a CPU: start one with `ray start`"
        largest = max(machines, key=lambda node: (node["Resources"]["CPU"], node["Resources"].get("GPU", 0.0)))
        cpus, gpus, memory = (largest["Resources"].get(name, 0.0) for name in ("CPU", "GPU", "memory"))
        return (
            f"asked for {resources}, but no machine of the cluster has that much: of {len(machines)} the largest, "
            f"{largest['NodeManagerHostname']}, has {cpus:g} CPUs, {gpus:g} GPUs and {memory:.0f} bytes of memory. Ask "
            "for less, or start a larger one"
        )

    def cancel(self) -> None:
        """Give up all calls whose outcomes have not been taken."""
        for call in list(self._calls):
            self._drop(call)

    def close(self) -> None:
        """Cancel what has not ended, and leave the cluster where that was asked for."""
        self.cancel()
        if self._disconnect:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self) -> None:
        """Give Ray the calls that wait, an exclusive one where a machine has no other exclusive one."""
        if not self._waiting:
            return
        # Who is free is found once, and not for each call that waits: both may be a thousand.
        taken = {call.node for call in self._calls}
        free = [node for node in self._candidates(exclusive=True) if node["NodeID"] not in taken]
        left = []
        for call in self._waiting:
            asked = call.resources
            options: dict[str, Any] = {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "memory": asked.memory}
            if asked.exclusive:
                node = next((node for node in free if asked.fit_into(node["Resources"])), None)
                if node is None:
                    left.append(call)
                    continue
                free.remove(node)
                call.node = node["NodeID"]
                # All of its CPUs: whatever else declares any waits until this call is over.
                options |= {"num_cpus": node["Resources"]["CPU"], "scheduling_strategy": _on(node)}
            call.reference = self._answer.options(**options).remote(call.function, asked.threads, *call.arguments)
            # A callback instead of `ray.wait`, whose cost grows with the calls that are out.
            call.reference.future().add_done_callback(lambda future, call=call: self._ended.put((call, future)))
        self._waiting = left

    def _settled(self, call: _Call, future: Future[CallOutcome | None] | None) -> CallOutcome | None:
        """What became of a call; None where it had not begun. It is sent again a moment later, which has no future."""
        if future is None:
            self._waiting.append(call)
            return None
        exceptions = self._ray.exceptions
        call.node = None
        try:
            outcome = future.result()
        except exceptions.RayError as error:
            # A machine may have gone: where it was kept for the call, Ray could not begin it.
            self._look_again = 0.0
            gone = isinstance(error, exceptions.TaskUnschedulableError)
            outcome = None if gone else CallOutcome(failure=self._reason(error))
        if outcome is None:
            threading.Timer(_UNTIL_AGAIN, self._ended.put, ((call, None),)).start()
            return None
        self._calls.remove(call)
        return replace(outcome, tag=call.tag)

    def _given_up(self) -> CallOutcome | None:
        """The outcome of a call that no machine could run for longer than patience allows."""
        now = time.monotonic()
        lacking = {asked: self.why_not(asked) for asked in {call.resources for call in self._calls}}
        for call in self._calls:
            why = lacking[call.resources]
            call.unfit = None if why is None else (call.unfit or now)
            if call.unfit is not None and now - call.unfit >= self._patience:
                self._drop(call)
                why = f"For {self._patience:.0f} seconds no machine could run it: {why}"
                return CallOutcome(tag=call.tag, failure=why, hopeless=True)
        return None

    def _drop(self, call: _Call) -> None:
        self._calls.remove(call)
        if call in self._waiting:
            self._waiting.remove(call)
        else:
            # A worker in the midst of a call does not look up before it is done: only force ends it.
            self._ray.cancel(call.reference, force=True)

    def _candidates(self, *, exclusive: bool) -> list[dict[str, Any]]:
        machines = self._machines()
        marked = [node for node in machines if EXCLUSIVE in node["Resources"]] if exclusive else []
        return marked or machines

    def _machines(self, *, fresh: bool = False) -> list[dict[str, Any]]:
        """The machines with CPUs, as Ray told a moment ago."""
        now = time.monotonic()
        if fresh or now >= self._look_again:
            self._nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            # To look takes a fiftieth of the time at most.
            self._look_again = time.monotonic() + max(_POLL, 50 * (time.monotonic() - now))
        return self._nodes

    def _reason(self, error: BaseException) -> str:
        """Why a call was not answered, in one line."""
        exceptions = self._ray.exceptions
        first = str(error).strip().split("\n", 1)[0][:_LONGEST_REASON]
        if isinstance(error, exceptions.OutOfMemoryError):
            return f"the machine ran low on memory and Ray ended the worker: {first}"
        if isinstance(error, exceptions.NodeDiedError):
            return f"its machine left the cluster: {first}"
        if isinstance(error, exceptions.WorkerCrashedError):
            return "its worker process died: it was killed (by the kernel, where memory ran out), or it crashed"
        return f"{type(error).__name__}: {first}"


def connect(address: str = HERE, *, environment: Mapping[str, str] | None = None) -> Executor:
    """Return an executor on a Ray cluster; its `close` leaves the cluster, and ends one that was started here.

    Where this process is connected already, that connection is taken as it is and stays.

    Args:
        address: `HERE`; `local`, a new cluster of this machine alone; `auto`, a cluster that must be there; `HOST:PORT`
            of a head node, on a machine of the cluster; `ray://HOST:PORT` from outside.
        environment: variables for the workers.

    Raises:
        KvtailorError: Ray is not installed, or there is no such cluster.
    """
    # Nothing is sent to the makers of Ray unless the user has asked for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise KvtailorError(
            f"asked for Ray, which cannot be imported here ({error}): run `pip install 'kvtailor[ray]'`"
        ) from error
    if ray.is_initialized():
        return Executor()
    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdigit():
            # Where nothing listens Ray itself would try for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_CONNECT).close()
        ray.init(
            address=None if address == HERE else address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
    # Whatever Ray does not like, an address, a token or a head that starts too slowly, it has no error of its own for.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise KvtailorError(
            f"asked for the Ray cluster {address!r}, which cannot be reached: {reason.rstrip('.')}. Start a head with "
            "`ray start --head --port 6379` and give HOST:6379; with RAY_AUTH_MODE=token every machine needs the same "
            "token"
        ) from error
    return Executor(disconnect=True)


# The accelerators that this worker process began with: CUDA sees no others until the process ends, of which there is
# an event once it was given others.
_DEVICES: list[tuple[str, ...]] = []
_LEAVING = threading.Event()


def answer(function: Callable[..., Any], threads: int | None, *arguments: Any) -> CallOutcome | None:
    """Run a call in this worker process of Ray; None where it is to run in another one.

    Args:
        function, arguments: see `Executor.submit`.
        threads: that torch computes in; None: as it is, and the function only looks at the machine.
    """
    import ray

    devices = tuple(map(str, ray.get_gpu_ids()))
    if devices and not _DEVICES:
        _DEVICES.append(devices)
    if devices and devices != _DEVICES[0] and threads is not None and not _LEAVING.is_set():
        # Ray gives an idle process to whoever comes next, and its CUDA still has the first devices. The answer goes out
        # first, and what comes until then is not begun.
        _LEAVING.set()
        threading.Timer(_UNTIL_GONE, os._exit, (0,)).start()
    if _LEAVING.is_set():
        return None
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    # A machine may have several nodes.
    machine = f"{platform.node()}/{ray.get_runtime_context().get_node_id()[:8]}"
    try:
        return CallOutcome(value=function(*arguments), machine=machine)
    except Exception as error:
        return CallOutcome(failure=f"{type(error).__name__}: {error}", machine=machine)


def _on(node: Mapping[str, Any]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
