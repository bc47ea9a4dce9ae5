"""The plans of a sample, scored side by side in forks of this process.

A fork begins with all that this process has: the model, the sample, and the prompts that are kept for all plans. So
nothing is loaded or sent, and memory is taken only for what a fork itself makes. Each fork computes in one thread: of a
small model a second thread takes off little, and the threads of OpenMP do not live on in a fork anyway. A fork scores
one plan after the other, as they are free; a plan whose fork dies has a record that says so. What loggers say in a fork
is not written; warnings come here.

For a model on a CPU, under Linux alone: an accelerator cannot be used in a fork, and other systems' libraries are not
made for it.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, current_process, get_context
from typing import TYPE_CHECKING, Any

import torch

from kvtailor.bench.measure.machine import free_bytes
from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.hf.model.processes import started

if TYPE_CHECKING:
    from kvtailor.bench.subject import Subject

__all__ = [
    "LostFork",
    "Score",
    "check_workers",
    "chosen_workers",
    "one_thread",
    "score_in_forks",
    "why_no_forks",
    "workers_for",
]

Score = Callable[[Callable[[], None]], Any]
"""Scores one plan; it is given what to call after each step."""

_EACH = 1 << 30
"""Bytes beside the weights' own and caches that a fork may come to take."""
_CACHES = 4
"""So many uncompressed caches a fork has at once: one that is filled, its parts, and what a method makes of them."""
_SECONDS_TO_END = 5.0
# What was said once is not said again, as where nothing is forked.
_WARNED: dict[Any, Any] = {}


class LostFork(KvtailorError):
    """A fork that ended before it had scored its plan."""


def why_no_forks(device: torch.device) -> str | None:
    """Return why plans cannot be scored side by side here, as the end of a sentence; None: they can."""
    if sys.platform != "linux":
        return f"processes are forked under Linux alone, and this is {sys.platform}"
    if device.type != "cpu":
        return f"the model is on {device.type}, which a fork of this process cannot use"
    if torch.cuda.is_initialized():
        return "CUDA has begun in this process, and cannot go on in a fork of it"
    if current_process().daemon:
        return "this process is a daemon of multiprocessing, which may have no children"
    if (processes := started().size) > 1:
        return f"{processes} processes share the model (torchrun), and a fork is none of them"
    return None


def workers_for(device: torch.device, weights: int, plans: int | None = None, cache: int = 0) -> int:
    """Return how many plans are best scored side by side: one a thread, as many as memory and plans allow.

    Args:
        device: of the model.
        weights: bytes of it; a fork may make the weights of some layers finer.
        plans: that there are to score; None: many.
        cache: bytes of an uncompressed one.
    """
    if why_no_forks(device) is not None:
        return 1
    most = torch.get_num_threads() if plans is None else min(torch.get_num_threads(), plans)
    free = free_bytes(device)
    return max(1, most if free is None else min(most, free // (_EACH + weights // 2 + _CACHES * cache)))


def check_workers(workers: int, device: torch.device) -> None:
    """Check that plans can be scored so.

    Raises:
        ArgumentError: there are to be none, or they cannot be forked here.
    """
    if workers < 1:
        raise ArgumentError(f"asked for {workers} workers: give 1 or more")
    if workers > 1 and (why := why_no_forks(device)) is not None:
        raise ArgumentError(f"asked for {workers} workers, but {why}: leave them out")


def chosen_workers(subject: Subject, asked: int | None, *, plans: int | None = None, cache: int = 0) -> int:
    """Return how many plans are scored side by side: as many as asked, or with None those of `workers_for`.

    Raises:
        ArgumentError: see `check_workers`.
    """
    if asked is None:
        weights = subject.weights()
        asked = workers_for(subject.device, weights[1] if weights else 0, plans, cache)
    check_workers(asked, subject.device)
    return asked


@contextmanager
def one_thread(workers: int) -> Iterator[None]:
    """While it is open, this process computes in one thread where there are several workers.

    What it scores itself is then rounded as the forks round, and can be compared with them to the last bit.
    """
    if workers == 1:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def score_in_forks(
    scores: Sequence[Score], workers: int, advance: Callable[[int], None]
) -> Generator[tuple[int, Any], None, None]:
    """Yield what each call returns with its number, as they end.

    Args:
        scores: the calls, begun in their order. What they change in memory stays in the fork.
        workers: so many forks at once.
        advance: called with a call's number after each of its steps.

    Raises:
        Exception: the first that a call raised; the other forks have been ended then. A call whose fork died gives a
            `LostFork` in place of what it returns.
    """
    waiting, forks = deque(range(len(scores))), list[_Fork]()
    try:
        while waiting or forks:
            while waiting and len(forks) < workers:
                forks.append(_begin(scores, [each.pipe for each in forks]))
                forks[-1].next(waiting.popleft())
            ready = connection.wait([each.pipe for each in forks])
            for fork in [each for each in forks if each.pipe in ready]:
                told = fork.told()
                for said in () if told is None else told.warned:
                    warnings.warn_explicit(*said, registry=_WARNED)
                if told is None:
                    forks.remove(fork)
                    yield fork.number, fork.lost()
                elif told.step:
                    advance(fork.number)
                elif told.error is not None:
                    raise told.error
                else:
                    number = fork.number
                    if waiting:
                        fork.next(waiting.popleft())
                    else:
                        fork.end()
                        forks.remove(fork)
                    yield number, told.value
    finally:
        for fork in forks:
            fork.process.kill()
            fork.end()


@dataclass
class _Told:
    """What a fork sends: a step, or the outcome of a call with the warnings that it gave: text, kind, file and line."""

    step: bool = False
    value: Any = None
    error: BaseException | None = None
    warned: tuple[tuple[str, type[Warning], str, int], ...] = ()


@dataclass(eq=False)
class _Fork:
    """One fork, as this process sees it: `number` is the call that it works on."""

    process: Any
    pipe: Any
    number: int = -1

    def next(self, number: int) -> None:
        """Have it work on a call."""
        self.number = number
        # One that died meanwhile is met when it is listened to.
        with suppress(OSError):
            self.pipe.send(number)

    def told(self) -> _Told | None:
        """What it sends; None: it is dead."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            return None
        assert isinstance(found, _Told)
        return found

    def lost(self) -> LostFork:
        """Why a dead one is."""
        self.process.join(_SECONDS_TO_END)
        code = self.process.exitcode
        how = f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit code {code}"
        likely = ", as where memory runs out" if code == -signal.SIGKILL else ""
        self.pipe.close()
        return LostFork(f"the process that scored it was ended by {how}{likely}: one worker (--workers 1) says more")

    def end(self) -> None:
        """Let it go."""
        self.pipe.close()
        self.process.join(_SECONDS_TO_END)
        if self.process.is_alive():
            self.process.kill()


def _begin(scores: Sequence[Score], others: Sequence[Any]) -> _Fork:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(scores, theirs, [ours, *others]), daemon=True)
    _ignore_threads()
    process.start()
    theirs.close()
    return _Fork(process, ours)


def _ignore_threads() -> None:
    """Have Python 3.12 and later not warn of threads: they are OpenMP's, idle and unused in a fork, and a terminal's.

    Once, since with each change of its filters Python forgets what it has warned of.
    """
    told = ".*multi-?threaded.*fork"
    there = any(getattr(each[1], "pattern", None) == told for each in warnings.filters)
    if sys.version_info >= (3, 12) and not there:
        warnings.filterwarnings("ignore", told, DeprecationWarning)


def _work(scores: Sequence[Score], pipe: Any, of_others: Sequence[Any]) -> None:
    """The life of a fork: call after call, until nobody asks."""
    # Who asks decides; an interrupt of the terminal goes to all processes at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # While a fork holds the other end of another one's pipe, that one would not see that this process has died.
    for each in of_others:
        each.close()
    # A thread that was writing when this process was forked holds the locks of these for ever, and those of logs.
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    logging.disable()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)

    def step() -> None:
        try:
            pipe.send(_Told(step=True))
        except OSError:
            # The process that asked is gone.
            os._exit(1)

    with suppress(EOFError, OSError):
        while True:
            pipe.send(_outcome(scores[pipe.recv()], step))
    sys.stdout.flush()
    # Whatever threads a method has left here end too.
    os._exit(0)


def _stream(number: int) -> io.TextIOWrapper:
    """A new stream for an open file; one that leads nowhere where it was closed."""
    try:
        return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True)
    except OSError:
        return open(os.devnull, "w")


def _outcome(score: Score, advance: Callable[[], None]) -> _Told:
    """What a call returned or raised, in a form that can be sent."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            told = _Told(value=score(advance))
        except BaseException as error:
            if not isinstance(error, KvtailorError):
                error.add_note("".join(traceback.format_exception(error)))
            told = _Told(error=error)
    told.warned = tuple((str(each.message), _kind(each.category), each.filename, each.lineno) for each in caught)
    return told if _travels(told) else _in_words(told)


def _kind(category: type[Warning]) -> type[Warning]:
    """The kind of a warning, or where that cannot be sent, what all are."""
    return category if _travels(category) else UserWarning


def _travels(sent: Any) -> bool:
    """Whether it can be sent, and an error is then of its kind."""
    try:
        found = pickle.loads(pickle.dumps(sent))
    except Exception:
        return False
    return not isinstance(sent, _Told) or type(found.error) is type(sent.error)


def _in_words(told: _Told) -> _Told:
    """An outcome that cannot be sent, as an error that can."""
    if told.error is None:
        error: Exception = RuntimeError(f"what was scored is a {type(told.value).__name__} that cannot be pickled")
    else:
        kind = KvtailorError if isinstance(told.error, KvtailorError) else RuntimeError
        error = kind(f"{type(told.error).__name__}: {told.error}")
        for note in getattr(told.error, "__notes__", []):
            error.add_note(note)
    return _Told(error=error, warned=told.warned)
