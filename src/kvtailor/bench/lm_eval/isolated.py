"""The lm-evaluation-harness inside a run of the bench: what it prints, draws and starts stays inside."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator

import torch

__all__ = ["one_process", "randomness_restored", "silence"]


@contextlib.contextmanager
def randomness_restored() -> Iterator[None]:
    """What the harness does with the global random states stays inside."""
    state = random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def silence() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Nothing of what the harness prints is shown; gives a function that calls another one as if outside."""
    out, err = sys.stdout, sys.stderr

    def loud(then: Callable[[], None]) -> None:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            then()

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield loud


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """The harness's bootstrap starts no processes of its own."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        del os.environ["DISABLE_MULTIPROC"]
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before
