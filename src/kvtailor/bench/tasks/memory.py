"""What a cache really takes: the growth of a fresh process, not what our own ledger says.

A fresh process for each plan loads the model, warms up, and then prefills a few caches and keeps them. Growth of its
memory for each cache, and the highest points during one prefill (logits of the last token only) and while decoding
after it, are read from the kernel, or from torch's allocator on an accelerator. Where that cannot be (no /proc, a model
that another process cannot load), or where the counters do not tell the truth (swap, a driver that goes on in the
host's memory), there is no number and the record says why.

Fields: `bytes_resident`, `bytes_peak`, `bytes_peak_decode`, and what the ledger of the same cache says in `bytes_held`.
Metrics: `bytes_before`, which is what the process had taken before the first cache and which none of these holds:
weights, and on the CPU the interpreter and its libraries; `weight_bytes` of the record is the weights alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.measure.fresh import STATE, answer, ask, prefill, random_tokens, why_not
from kvtailor.bench.measure.memory_gauge import Gauge
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject, hash_of
from kvtailor.bench.tasks import Given, Task
from kvtailor.errors import KvtailorError

__all__ = ["Memory", "weigh_in_this_process"]

_DECODED = 32


@dataclass(frozen=True, kw_only=True)
class Memory(Task):
    """One fresh process for each plan.

    Attributes:
        context: random tokens of each row of a prefill.
        batch: rows of each cache.
        caches: caches that are held at once; more make the growth of one more exact.
        limit: seconds after which a process is given up.
    """

    name: ClassVar[str] = "memory"
    version: ClassVar[int] = 3
    context: int = 512
    batch: int = 1
    caches: int = 4
    limit: float = 300.0

    def __post_init__(self) -> None:
        if min(self.context, self.batch, self.caches) < 1:
            raise ValueError(
                f"asked for context={self.context}, batch={self.batch}, caches={self.caches}: give at least 1 of each"
            )

    def cells(self, contestants: int) -> int:
        return contestants + 1

    def units(self, contestants: int) -> int:
        return contestants + 1

    def measure(self, given: Given) -> Iterator[Record]:
        positions = given.subject.positions
        if positions is not None and self.context + _DECODED > positions:
            raise KvtailorError(
                f"asked for {self.context} tokens and {_DECODED} decoded ones, but {given.subject.name} has "
                f"{positions} positions: ask for a shorter context"
            )
        settings = {"context": self.context, "batch": self.batch, "caches": self.caches}
        for contestant in [OWN, *given.contestants]:
            begin = time.perf_counter()
            point = {"context": self.context, "batch": self.batch, "caches": self.caches}
            blank = replace(given.blank(contestant), point=point, text="random tokens", state=STATE)
            why = why_not(given.subject)
            if why is None:
                blank = replace(blank, text_hash=hash_of(random_tokens(given.subject, self.context, self.batch)))
                if (known := given.known(blank)) is not None:
                    given.advance(f"memory · {contestant.label}")
                    yield known
                    continue
            found: dict[str, Any] = {"error": why}
            if why is None:
                found = ask(__name__, given.subject, contestant, settings, self.limit)
            given.advance(f"memory · {contestant.label}")
            if "bytes_by_layer" in found:
                found["bytes_by_layer"] = tuple(found["bytes_by_layer"])
            if "tokens_by_head" in found:
                found["tokens_by_head"] = tuple(map(tuple, found["tokens_by_head"]))
            yield replace(blank, wall_seconds=time.perf_counter() - begin, **found)


def weigh_in_this_process(
    subject: Subject, contestant: Contestant, gauge: Gauge, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What the fresh process does: fields of a `Record`.

    Args:
        subject, contestant: what runs.
        gauge: counters of this process.
        settings: `context`, `batch` and `caches` of the task.
    """
    ids = random_tokens(subject, settings["context"], settings["batch"])

    def prefilled() -> tuple[Tensor, Any]:
        return prefill(subject, contestant, ids)

    # As long as what is measured: libraries take memory of their own when a step first comes to be.
    for _ in range(2):
        subject.decode(*prefilled(), tokens=_DECODED)
    before = gauge.now()
    gauge.reset()
    tokens, cache = prefilled()
    peak = gauge.highest() - before
    more = [prefilled()[1] for _ in range(settings["caches"] - 1)]
    grown = gauge.now() - before
    weight = weigh(cache)
    more.clear()
    gauge.now()
    gauge.reset()
    subject.decode(tokens, cache, tokens=_DECODED)
    peak_decode = gauge.highest() - before
    return {
        "samples": settings["caches"],
        "text_hash": hash_of(ids),
        "bytes_resident": grown // settings["caches"],
        "bytes_peak": peak if gauge.resets else None,
        "bytes_peak_decode": peak_decode if gauge.resets else None,
        "metrics": {"bytes_before": before},
        **weight,
    }


if __name__ == "__main__":
    answer(weigh_in_this_process)
