"""What a cache really takes: the growth of a fresh process, not what our own ledger says.

A child process loads the model, warms up, and then prefills a few caches and keeps them. Growth of its resident memory
for each cache, and the highest point during one prefill, are read from the kernel. Where that cannot be (no /proc, a
model that another process cannot load, an accelerator), there is no number and the record says why.

Metrics: none. Fields: `bytes_resident`, `bytes_peak`, and what the ledger of the same cache says in `bytes_held`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtailor.bench.machine import resident_bytes
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import OWN, Contestant, Subject, hash_of, weigh
from kvtailor.bench.tasks import Given, Task
from kvtailor.errors import KvtailorError

__all__ = ["Memory"]

_STATE = 7


@dataclass(frozen=True, kw_only=True)
class Memory(Task):
    """One fresh process for each plan.

    Attributes:
        context: random tokens of each prefill.
        caches: caches that are held at once; more make the growth of one more exact.
        limit: seconds after which a child is given up.
    """

    name: ClassVar[str] = "memory"
    version: ClassVar[int] = 1
    context: int = 512
    caches: int = 4
    limit: float = 300.0

    def units(self, contestants: int) -> int:
        return contestants + 1

    def measure(self, given: Given) -> Iterator[Record]:
        for contestant in [OWN, *given.contestants]:
            begin = time.perf_counter()
            blank = replace(
                given.blank(contestant), point={"context": self.context, "batch": 1}, text="random tokens", state=_STATE
            )
            why = _why_not(given.subject)
            if why is None:
                blank = replace(blank, text_hash=hash_of(_random_tokens(given.subject, self.context)))
                if (known := given.known(blank)) is not None:
                    given.advance(f"memory · {contestant.label}")
                    yield known
                    continue
            found: dict[str, Any] = {"error": why} if why else self._ask(given.subject, contestant)
            given.advance(f"memory · {contestant.label}")
            if "bytes_by_layer" in found:
                found["bytes_by_layer"] = tuple(found["bytes_by_layer"])
            if "tokens_by_head" in found:
                found["tokens_by_head"] = tuple(map(tuple, found["tokens_by_head"]))
            yield replace(blank, wall_seconds=time.perf_counter() - begin, **found)

    def _ask(self, subject: Subject, contestant: Contestant) -> dict[str, Any]:
        request = {"model": subject.name, "plan": contestant.plan, "context": self.context, "caches": self.caches}
        source = str(Path(__file__).resolve().parents[3])
        environment = {
            **os.environ,
            # Every block of some size gets its own mapping, so that what is freed leaves the resident memory at once.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                timeout=self.limit,
                env=environment,
                check=False,
            )
            if done.returncode == 0:
                answer = json.loads(done.stdout.splitlines()[-1])
                assert isinstance(answer, dict)
                return answer
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"error": f"The measuring process ended with status {done.returncode}: {last}"}
        except subprocess.TimeoutExpired:
            return {"error": f"The measuring process took longer than {self.limit:.0f} seconds and was ended."}


def weigh_in_this_process(subject: Subject, contestant: Contestant, context: int, caches: int) -> dict[str, Any]:
    """What the child does: fields of a `Record`."""
    ids = _random_tokens(subject, context)

    def prefilled() -> Any:
        return subject.forward(ids, subject.new_cache(contestant), last_only=True)[1]

    for _ in range(2):
        prefilled()
    _settle()
    before = resident_bytes()
    if before is None:
        return {"error": "This system does not tell a process its resident memory."}
    _reset_peak()
    held = [prefilled()]
    peak = resident_bytes()
    held += [prefilled() for _ in range(caches - 1)]
    _settle()
    after = resident_bytes()
    assert peak is not None and after is not None
    return {
        "samples": caches,
        "text_hash": hash_of(ids),
        "bytes_resident": (after[0] - before[0]) // caches,
        "bytes_peak": peak[1] - before[0] if _PEAK_RESETS else None,
        **weigh(held[0]),
    }


def _random_tokens(subject: Subject, context: int) -> Tensor:
    """(1, context) int64, the same in every process."""
    vocabulary = int(subject.model.config.get_text_config().vocab_size)
    return torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(_STATE))


_PEAK_RESETS = os.access("/proc/self/clear_refs", os.W_OK)


def _reset_peak() -> None:
    if _PEAK_RESETS:
        Path("/proc/self/clear_refs").write_text("5")


def _settle() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _why_not(subject: Subject) -> str | None:
    if not subject.loadable:
        return f"A fresh process cannot load {subject.name!r} by its name."
    if subject.device.type != "cpu":
        return f"Memory of a fresh process is read on the CPU only, and the model is on {subject.device}."
    return None if resident_bytes() else "This system does not tell a process its resident memory."


def _child() -> None:
    from kvtailor.hf.loading import load

    request = json.load(sys.stdin)
    model, _ = load(request["model"])
    plan = request["plan"]
    contestant = OWN if plan is None else Contestant(label=plan, plan=plan, hash="")
    try:
        answer = weigh_in_this_process(
            Subject(name=request["model"], model=model), contestant, request["context"], request["caches"]
        )
    except (KvtailorError, ValueError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _child()
