"""Judges many pairs, each in a process of its own with a time limit, so that no family can stop the others."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.every_model.judge import CRASH, Verdict, judge
from tests.support.every_model.pairs import Pair

__all__ = ["judged"]

LIMIT = 90.0
"""Seconds that one pair may take."""
MEMORY = 6 * 2**30
"""Bytes of address space that a pair may take beyond what is there."""
# Imported once, so that each process does not: what most families need.
_COMMON = ("llama", "siglip", "qwen2_vl", "bert", "clip")


def judged(pairs: Iterable[Pair], limit: float = LIMIT) -> Iterator[Verdict]:
    """Yield the verdict on each pair as it is reached."""
    transformers.logging.set_verbosity_error()
    for family in _COMMON:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    for pair in pairs:
        began = time.perf_counter()
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(pair, writer), daemon=True)
        process.start()
        writer.close()
        found = _received(reader, limit)
        if found is None:
            process.kill()
            process.join()
            ended = time.perf_counter() - began >= limit
            reason = f"it took more than {limit:.0f} s" if ended else f"its process ended with {process.exitcode}"
            found = Verdict(*pair, verdict=CRASH, reason=reason, where="a process of its own")
        process.join()
        reader.close()
        found.seconds = round(time.perf_counter() - began, 2)
        yield found


def _received(reader: Any, limit: float) -> Verdict | None:
    try:
        return reader.recv() if reader.poll(limit) else None
    except EOFError:
        return None


def _work(pair: Pair, writer: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    try:
        found = judge(pair)
    except Exception as error:
        found = Verdict(*pair, verdict=CRASH, reason=f"the judge itself: {type(error).__name__}: {error}")
    writer.send(found)
    writer.close()
