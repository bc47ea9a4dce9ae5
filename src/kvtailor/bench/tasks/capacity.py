"""How many rows, and how long a context, fit a given memory under each plan.

*Definition*: n tokens in b rows fit M bytes where weights + peak <= M. Weights: unique storages of the parameters.
Peak: the highest point of a fresh process above what it held before, while it prefills b rows of n random tokens
(logits of the last token only) and then decodes `tokens` more for each row. So it holds the cache at the end of the
prompt, the scratch of the prefill (activations, attention, scoring, encoding) and the cache while it grows: whoever
runs the prompt needs them all at once. It does not hold the interpreter, libraries or an accelerator's context, which
are the same for every plan; each size is run once before it is measured, so that what libraries load at their first
use is not taken for the cache's.

A fresh process for each plan measures two small sizes, draws a line through what they needed, measures where the line
meets M, draws it anew, and so on until one size is measured to fit and the next one (a row, or `step` tokens) not to.
Such a number is *verified*. Sizes above `reach` tokens in all are not run: there the line through the two largest sizes
that were run decides, `verified` is 0 and a note says so. No context goes beyond the model's positions.

Metrics: `largest_batch` (rows of `context` tokens; 0: not even one fits), `longest_context` (tokens of one row),
`largest_batch_verified` and `longest_context_verified` (1 or 0), `verified` (both), `limited_by_positions` (1 where the
context could not grow for want of positions and not of memory), `bytes_per_token` and `bytes_constant` (line of the
*cache's* own bytes at the end of the prompt, one row, through the longest context that was run and half of it),
`memory_bytes` (M, also where it was not given).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored
from kvtailor.bench.tasks.settings import Column, Count, Metric, Option, Shown, setting
from kvtailor.errors import ArgumentError, KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.measure.memory_gauge import Gauge
    from kvtailor.bench.subject import Subject

__all__ = ["Capacity", "Limit", "Need", "capacity_of", "largest"]

_TRIES = 24


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a size was measured to take, in bytes: the cache at the end of the prompt, and weights + peak."""

    cache: int
    whole: int


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest size that fits; whether it and the next were measured; why it is not larger."""

    size: int
    verified: bool
    by: str


@dataclass(frozen=True, kw_only=True)
class Capacity(PlanByPlan):
    """One fresh process for each plan.

    Attributes:
        memory_bytes: what must suffice for weights, cache and scratch; None: what the device has free when the process
            starts.
        context: tokens of each row, for the largest batch.
        tokens: tokens decoded for each row.
        step: the longest context is found to this many tokens.
        reach: most tokens, over all rows, that are run.
        limit: seconds after which a process is given up.
    """

    name: ClassVar[str] = "capacity"
    version: ClassVar[int] = 1
    order: ClassVar[int] = 6
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="largest_batch", unit="sequences", higher_is_better=True),
        Metric(name="longest_context", unit="tokens", higher_is_better=True),
        Metric(name="largest_batch_verified", unit="1 where it was run"),
        Metric(name="longest_context_verified", unit="1 where it was run"),
        Metric(name="verified", meaning="1 where both were run"),
        Metric(name="limited_by_positions", meaning="1 where the context ended for want of positions"),
        Metric(name="bytes_per_token", unit="bytes per token", higher_is_better=False),
        Metric(name="bytes_constant", unit="bytes", higher_is_better=False),
        Metric(name="memory_bytes", unit="bytes", meaning="what was to suffice"),
    )
    shown: ClassVar[Shown] = Shown(
        terminal=(
            Column("batch fits", "largest_batch", form="about"),
            Column("context fits", "longest_context", form="about"),
        ),
        title="What fits",
        note=(
            "The largest batch and the longest context that fit in this memory; not run: reckoned from those that were."
        ),
        own=(
            Column("memory", "memory_bytes", form="bytes"),
            Column("largest batch", "largest_batch", form="run or not"),
            Column("longest context", "longest_context", form="run or not"),
            Column("one more token", "bytes_per_token", form="bytes"),
        ),
    )
    of_cost: ClassVar[bool] = True
    own_cache: ClassVar[bool] = True
    memory_bytes: Count | None = setting(
        None,
        option=Option(
            flag="--memory",
            unit="bytes",
            help="What capacity may fill, such as 8GiB.  [what the machine has free]",
        ),
    )
    context: int = 1024
    tokens: int = 8
    step: int = 64
    reach: int = 32768
    limit: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.context, self.tokens, self.step) < 1:
            raise ArgumentError(
                f"asked for context={self.context}, tokens={self.tokens}, step={self.step}: give at least 1 of each"
            )
        if self.reach < max(2 * self.context, 4 * self.step):
            raise ArgumentError(
                f"asked for reach={self.reach} with context={self.context}, step={self.step}: two rows, and four "
                f"steps, must be run; give reach={max(2 * self.context, 4 * self.step)} or more"
            )

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        from kvtailor.bench.measure.fresh import STATE, why_not
        from kvtailor.bench.measure.memory_gauge import gauge_of

        names = ("memory_bytes", "context", "tokens", "step", "reach")
        settings: dict[str, object] = {name: getattr(self, name) for name in names}
        positions = subject.positions
        if positions is not None and self.context + self.tokens > positions:
            raise KvtailorError(
                f"asked for a batch of {self.context} + {self.tokens} tokens, but {subject.name} has {positions} "
                "positions: ask for a shorter context"
            )
        why = why_not(subject)
        if self.memory_bytes is None and why is None:
            # One memory for all plans; what is free now is another question than what was free then.
            settings["memory_bytes"] = gauge_of(subject.device).free
        yield Sample(point=settings, text="random tokens", state=STATE, data=why)

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        from kvtailor.bench.measure.fresh import measured

        if sample.data is not None:
            raise KvtailorError(sample.data)
        found = measured(__name__, subject, contestant, sample.point, self.limit)
        return Scored(samples=found.pop("samples"), metrics=found.pop("metrics"), notes=found.pop("notes"), held=found)


def largest(
    need: Callable[[int], int], memory: int, *, start: int, step: int, reach: int, most: int | None = None
) -> Limit:
    """The largest multiple of `step` whose need is at most `memory`.

    Args:
        need: measures a size in bytes; grows with it.
        memory: bytes.
        start: the first size that is measured.
        step: sizes are multiples of it.
        reach: no larger size is measured.
        most: no larger size exists; None: there is no such limit.
    """
    top = min(reach, reach if most is None else most) // step * step
    known: dict[int, int] = {}
    fits, over, width = 0, top + step, float("inf")
    for _ in range(_TRIES):
        if over - fits <= step:
            break
        guess = _meets(known, memory)
        if guess is None:
            guess = 2 * fits if fits else min(start, over // 2)
        elif over in known and 2 * (over - fits) > width:
            # The line did not narrow it down by half: the need bends, and halving is safe.
            guess = (fits + over) // 2
        width = over - fits if over in known else width
        size = min(max(guess // step * step, fits + step), over - step)
        known[size] = need(size)
        fits = max((each for each, whole in known.items() if whole <= memory), default=0)
        over = min((each for each, whole in known.items() if whole > memory and each > fits), default=top + step)
    if over in known:
        return Limit(size=fits, verified=over - fits <= step, by="memory")
    if fits < top:
        return Limit(size=fits, verified=False, by="reach")
    if most is not None and top == most // step * step:
        return Limit(size=top, verified=True, by="positions")
    guess = _meets(known, memory)
    if most is not None and (guess is None or guess >= most):
        return Limit(size=most // step * step, verified=False, by="positions")
    return Limit(size=max(top, (guess or 0) // step * step), verified=False, by="memory" if guess else "reach")


def capacity_of(subject: Subject, contestant: Contestant, gauge: Gauge, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the fresh process does: fields of a `Record`.

    Args:
        subject, contestant: what runs.
        gauge: counters of this process.
        settings: `memory_bytes`, `context`, `tokens`, `step` and `reach` of the task.

    Raises:
        KvtailorError: the memory or its high-water mark cannot be read.
    """
    from kvtailor.bench.measure.fresh import prefill, random_tokens
    from kvtailor.bench.measure.memory_gauge import is_out_of_memory

    weights, memory = subject.weights(), settings["memory_bytes"] or gauge.free
    if weights is None or memory is None or not gauge.resets:
        raise KvtailorError(
            "Capacity needs a model with weights, a memory (give memory_bytes where the system does not say what is "
            "free), and a high-water mark that can be reset."
        )
    known: dict[tuple[int, int], Need] = {}

    def need_of(ids: Tensor) -> Need:
        subject.decode(*prefill(subject, contestant, ids), tokens=1)
        before = gauge.now()
        gauge.reset()
        following, cache = prefill(subject, contestant, ids)
        held = bytes_of(cache)
        assert held is not None
        subject.decode(following, cache, settings["tokens"])
        return Need(cache=held, whole=weights[1] + gauge.highest() - before)

    def need(context: int, batch: int) -> Need:
        if (context, batch) not in known:
            ids = random_tokens(subject, context, batch)
            try:
                known[context, batch] = need_of(ids)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                # What does not fit the device does not fit a memory that is no larger.
                known[context, batch] = Need(cache=0, whole=max(memory, gauge.free or 0) + 1)
        return known[context, batch]

    return _found(need, known, memory, settings, subject.positions)


def _found(
    need: Callable[[int, int], Need],
    known: Mapping[tuple[int, int], Need],
    memory: int,
    settings: Mapping[str, Any],
    positions: int | None,
) -> dict[str, Any]:
    context, step, reach = settings["context"], settings["step"], settings["reach"]
    rows = largest(lambda batch: need(context, batch).whole, memory, start=1, step=1, reach=reach // context)
    most = None if positions is None else positions - settings["tokens"]
    longest = largest(lambda n: need(n, 1).whole, memory, start=4 * step, step=step, reach=reach, most=most)
    run = max((n for (n, batch), each in known.items() if batch == 1 and each.whole <= memory), default=0)
    slope = constant = None
    if run >= 2:
        high, low = need(run, 1).cache, need(run // 2, 1).cache
        slope = (high - low) / (run - run // 2)
        constant = high - slope * run
    return {
        "samples": len(known),
        "metrics": {
            "largest_batch": rows.size,
            "longest_context": longest.size,
            "largest_batch_verified": float(rows.verified),
            "longest_context_verified": float(longest.verified),
            "verified": float(rows.verified and longest.verified),
            "limited_by_positions": float(longest.by == "positions"),
            "bytes_per_token": slope,
            "bytes_constant": constant,
            "memory_bytes": memory,
        },
        "notes": _notes(rows, longest, context, reach, positions),
    }


def _notes(rows: Limit, longest: Limit, context: int, reach: int, positions: int | None) -> list[str]:
    found = []
    for limit, what in ((rows, f"largest batch at {context} tokens"), (longest, "longest context")):
        if limit.by == "reach":
            found.append(f"The {what} is at least {limit.size}: more than {reach} tokens were not run.")
        elif not limit.verified:
            found.append(f"The {what}, {limit.size}, is a line through smaller sizes and was not run itself.")
    if longest.by == "positions":
        found.append(f"The longest context is limited by the model's {positions} positions, not by memory.")
    return found


def _meets(known: Mapping[int, int], memory: int) -> int | None:
    """Where the line through the two measured sizes around `memory`, or nearest to it, meets it; None where none."""
    sizes = sorted(known)
    if len(sizes) < 2:
        return None
    above = next((i for i, size in enumerate(sizes) if known[size] > memory), len(sizes) - 1)
    low, high = sizes[max(above, 1) - 1], sizes[max(above, 1)]
    slope = (known[high] - known[low]) / (high - low)
    return int(low + (memory - known[low]) / slope) if slope > 0 else None


if __name__ == "__main__":
    from kvtailor.bench.measure.fresh import answer

    answer(capacity_of)
