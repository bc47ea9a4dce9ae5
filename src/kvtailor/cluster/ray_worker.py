"""What runs in a worker process of Ray: one call, with the values that calls share kept from one to the next."""

from __future__ import annotations

import os
import platform
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from kvtailor.cluster.contract import Shared

__all__ = ["WorkerReply", "InObjectStore", "answer", "machine_name"]

_KEPT = 4
_FETCHED: OrderedDict[str, Any] = OrderedDict()
# The accelerators that this process began with: CUDA sees no others until the process ends.
_DEVICES: list[tuple[str, ...]] = []


@dataclass(frozen=True, kw_only=True)
class WorkerReply:
    """What a worker sends back.

    Attributes:
        value: what the function returned.
        failure: the error that it raised; None where it returned.
        machine: see `machine_name`.
        moved: the process was given other accelerators than it began with, so that nothing was done. It ends, and the
            call is to be begun again.
    """

    value: Any = None
    failure: str | None = None
    machine: str
    moved: bool = False


class InObjectStore(Shared):
    """A value in Ray's object store; each process unpickles it once, and keeps the latest few.

    Args:
        reference: of Ray.
    """

    def __init__(self, reference: Any):
        self._reference, self._name = reference, str(reference.hex())

    @property
    def name(self) -> str:
        return self._name

    def get(self) -> Any:
        if self._name not in _FETCHED:
            _FETCHED[self._name] = ray.get(self._reference)
            while len(_FETCHED) > _KEPT:
                _FETCHED.popitem(last=False)
        _FETCHED.move_to_end(self._name)
        return _FETCHED[self._name]


def answer(function: Callable[..., Any], arguments: tuple[Any, ...], threads: int | None) -> WorkerReply:
    """Run a call in this process.

    Args:
        function, arguments: see `contract.Call`.
        threads: that torch computes in; None: as it is.
    """
    here = machine_name()
    devices = tuple(map(str, ray.get_gpu_ids()))
    if devices:
        if not _DEVICES:
            _DEVICES.append(devices)
        if devices != _DEVICES[0]:
            # Ray gives an idle process to whoever comes next, and its CUDA still has the first devices. The answer
            # goes out first.
            threading.Timer(0.2, os._exit, (0,)).start()
            return WorkerReply(machine=here, moved=True)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    try:
        return WorkerReply(value=function(*arguments), machine=here)
    except Exception as error:
        return WorkerReply(failure=f"{type(error).__name__}: {error}", machine=here)


def machine_name() -> str:
    """Return the name of this machine and the beginning of Ray's number of its node: a machine may have several."""
    return f"{platform.node()}/{ray.get_runtime_context().get_node_id()[:8]}"
