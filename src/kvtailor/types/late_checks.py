"""Questions about numbers that only a device knows, answered together, so that the host waits once for all of them.

Python runs ahead of a GPU. Each number that it reads makes it wait until the GPU has done all that was asked of it, and
the GPU then idles. Most of what is read are checks that nearly always pass: no score is NaN, a selector has kept as
many tokens as it was asked for. Their answers are not needed to go on, only before anything that depends on them is
given out. So a cache collects them (`LateChecks`) and reads them at once: at the end of a prompt, and for a decoded
token before the next forward begins. What an eviction does has no part in the outputs of its own forward, so nothing
is given out that a failed check should have stopped.

On the CPU nothing waits, and every check is made where it stands.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LateChecks", "all_finite", "read_flag", "require_none", "send"]


@dataclass
class _Check:
    """A flag () bool on a device, and the error that is due where it is set; `failed` once the host has read it."""

    flag: Tensor
    error: Callable[[], Exception]
    failed: bool | None = None


class _OfThread(threading.local):
    """The collections of one thread that hold checks which were not read yet."""

    def __init__(self) -> None:
        self.waiting: weakref.WeakSet[LateChecks] = weakref.WeakSet()


_OF_THREAD = _OfThread()
_COLLECTING: ContextVar[LateChecks | None] = ContextVar("late checks", default=None)


class LateChecks:
    """The checks of one cache.

    Attributes:
        waiting: those that were not settled yet, in the order in which they came.
    """

    def __init__(self) -> None:
        self.waiting: list[_Check] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within it, `require_none` puts checks of a device's numbers here."""
        token = _COLLECTING.set(self)
        try:
            yield
        finally:
            _COLLECTING.reset(token)

    def add(self, flag: Tensor, error: Callable[[], Exception]) -> None:
        """Collect one check; see `require_none`."""
        self.waiting.append(_Check(flag, error))
        _OF_THREAD.waiting.add(self)

    def settle(self, refuse: Callable[[str], object] | None = None) -> None:
        """Read what was collected, in one transfer for each device, and forget it.

        Args:
            refuse: called with the sentence of an error before it is raised, where nothing else notices it.

        Raises:
            Exception: the first check that failed has this error.
        """
        if not self.waiting:
            return
        checks = self.waiting
        self.forget()
        unread = [check for check in checks if check.failed is None]
        for device in dict.fromkeys(check.flag.device for check in unread):
            _read([check for check in unread if check.flag.device == device])
        for check in checks:
            if check.failed:
                error = check.error()
                if refuse is not None:
                    refuse(str(error))
                raise error

    def forget(self) -> None:
        """Forget what was collected."""
        self.waiting = []
        _OF_THREAD.waiting.discard(self)

    def unread(self, device: torch.device) -> list[_Check]:
        """Return the checks of a device that the host has not read."""
        return [check for check in self.waiting if check.failed is None and check.flag.device == device]


def all_finite(states: Tensor) -> Tensor:
    """Return () bool, whether no number is NaN or infinite, on the device of the states.

    On a CPU by the least and the largest, which NaN spoils: one pass, a fifteenth of the time of `torch.isfinite`.
    Other backends of torch may have no such pass.
    """
    if states.device.type != "cpu" or not states.numel():
        return states.isfinite().all()
    return torch.stack(states.aminmax()).isfinite().all()


def require_none(wrong: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error if anything is set: at once on the CPU, else when the cache at work reads what it has collected.

    Outside of a cache's work the host waits for the answer here.

    Args:
        wrong: bool, of any shape.
        error: makes the error. It may be called much later: it should hold small tensors alone.
    """
    flag, collecting = wrong.any(), _COLLECTING.get()
    if collecting is not None and flag.device.type != "cpu":
        collecting.add(flag, error)
    elif bool(flag):
        raise error()


def read_flag(flag: Tensor) -> bool:
    """Return a truth value () of a device; what this thread's caches have collected there is read in the same transfer.

    What failed is raised by the cache that it belongs to, when that one settles.
    """
    if flag.device.type == "cpu":
        return bool(flag)
    own = _Check(flag, RuntimeError)
    _read([own, *(check for each in list(_OF_THREAD.waiting) for check in each.unread(flag.device))])
    return bool(own.failed)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the CPU on a device, without waiting for that.

    From ordinary memory CUDA takes what it copies before the call returns, so the tensor may change afterwards. Metal
    may read it later, so it is waited for there.
    """
    return tensor.to(device, non_blocking=device.type != "mps")


def _read(checks: Sequence[_Check]) -> None:
    """Read the flags of checks on one device in one transfer."""
    answers = torch.stack([check.flag for check in checks]).tolist()
    for check, answer in zip(checks, answers, strict=True):
        check.failed = bool(answer)
