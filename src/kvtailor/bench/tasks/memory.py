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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.settings import BATCHES, CONTEXTS, Column, Count, Metric, Shown, setting
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.measure.memory_gauge import Gauge
    from kvtailor.bench.subject import Subject

__all__ = ["Memory", "weigh_in_this_process"]

_DECODED = 32  # as `Memory.generates` declares


@dataclass(frozen=True, kw_only=True)
class Memory(PlanByPlan):
    """One fresh process for each plan.

    Attributes:
        context: random tokens of each row of a prefill.
        batch: rows of each cache.
        caches: caches that are held at once; more make the growth of one more exact.
        limit: seconds after which a process is given up.
    """

    name: ClassVar[str] = "memory"
    version: ClassVar[int] = 3
    order: ClassVar[int] = 5
    usual: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (Metric(name="bytes_before", unit="bytes"),)
    shown: ClassVar[Shown] = Shown(
        terminal=(
            Column("peak prefill", "bytes_peak", form="bytes"),
            Column("decode", "bytes_peak_decode", form="bytes"),
        ),
        title="Memory of a fresh process",
        note="Above what the process held before its first cache, so without the weights.",
        own=(
            Column("bytes held", "bytes_held", form="bytes"),
            Column("of full, %", "bytes_held", 1, form="percent of", beside="bytes_full"),
            Column("resident", "bytes_resident", form="bytes"),
            Column("peak, prefill", "bytes_peak", form="bytes"),
            Column("peak, decode", "bytes_peak_decode", form="bytes"),
        ),
    )
    of_cost: ClassVar[bool] = True
    own_cache: ClassVar[bool] = True
    generates: ClassVar[int] = 32
    context: Count = setting(512, option=CONTEXTS, each=True, counts_tokens=True)
    batch: Count = setting(1, option=BATCHES, each=True)
    caches: Count = setting(4)
    limit: float = setting(300.0)

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        from kvtailor.bench.measure.fresh import STATE, random_tokens, why_not

        positions = subject.positions
        if positions is not None and self.context + _DECODED > positions:
            raise KvtailorError(
                f"asked for {self.context} tokens and {_DECODED} decoded ones, but {subject.name} has "
                f"{positions} positions: ask for a shorter context"
            )
        why = why_not(subject)
        yield Sample(
            point={"context": self.context, "batch": self.batch, "caches": self.caches},
            text="random tokens",
            text_hash=hash_of(random_tokens(subject, self.context, self.batch)) if why is None else None,
            state=STATE,
            data=why,
        )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        from kvtailor.bench.measure.fresh import measured

        if sample.data is not None:
            raise KvtailorError(sample.data)
        found = measured(__name__, subject, contestant, sample.point, self.limit)
        advance()
        if "bytes_by_layer" in found:
            found["bytes_by_layer"] = tuple(found["bytes_by_layer"])
        if "tokens_by_head" in found:
            found["tokens_by_head"] = tuple(map(tuple, found["tokens_by_head"]))
        return Scored(samples=found.pop("samples"), metrics=found.pop("metrics"), held=found)


def weigh_in_this_process(
    subject: Subject, contestant: Contestant, gauge: Gauge, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What the fresh process does: fields of a `Record`.

    Args:
        subject, contestant: what runs.
        gauge: counters of this process.
        settings: `context`, `batch` and `caches` of the task.
    """
    from kvtailor.bench.measure.fresh import prefill, random_tokens

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
    from kvtailor.bench.measure.fresh import answer

    answer(weigh_in_this_process)
