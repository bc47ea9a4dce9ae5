"""What a sweep costs its driver, and so how many workers one driver feeds; the numbers of docs/scaling.md.

python -m benchmarks.cluster driver      cells that do nothing, answered in this process: the bench's own cost
python -m benchmarks.cluster ray         the same cells on a Ray cluster of this machine
python -m benchmarks.cluster samples     what making a sample costs, which the driver does once for all plans
python -m benchmarks.cluster waiting     outcomes of calls with up to 10,000 out, by callback and by ray.wait
python -m benchmarks.cluster simulate SECONDS     up to 1,000 workers fed by a driver of so many seconds a cell
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from rich.console import Console
from tests.support.in_process import InProcess

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.progress import watch
from kvtailor.bench.runner import contestants_of, plan_run, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.settings import Metric
from kvtailor.cluster import CallOutcome, Executor, connect

__all__: list[str] = []

PLANS = ["snapkv @ keep=0.25", "kivi(bits=4)", "streaming @ keep=0.25"]
VALUES = 50


@dataclass(frozen=True, kw_only=True)
class Nothing(PlanByPlan):
    """Cells without work; each record has the values of fifty windows, as those of `perplexity` have."""

    name: ClassVar[str] = "nothing"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric(name="score", unit="share"),)
    count: int = 500

    def points(self) -> int:
        return self.count

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        for index in range(self.count):
            yield Sample(point={"index": index}, text="nothing", text_hash=str(index))

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        return Scored(samples=VALUES, metrics={"score": 1.0}, values={"score": (1.0,) * VALUES})


class _Timed(InProcess):
    """Counts the processor seconds of the calls themselves, which workers would spend."""

    seconds = 0.0

    def take(self) -> CallOutcome:
        begin = time.process_time()
        try:
            return super().take()
        finally:
            self.seconds += time.process_time() - begin


def measure(executor: Executor, count: int) -> tuple[int, float, float]:
    """Return cells, seconds and processor seconds of a run of cells that do nothing, records and progress included."""
    task, contestants = Nothing(count=count), contestants_of(PLANS)
    subject = Subject.load("demo")
    with (
        TemporaryDirectory() as folder,
        Path("/dev/null").open("w", encoding="utf-8") as nowhere,
        watch(*plan_run([task], contestants), Console(file=nowhere)) as seen,
    ):
        # The first cell waits for workers that load the model.
        run(subject, contestants, [Nothing(count=2)], bandwidth=False, executor=executor)
        begin, ran = time.perf_counter(), time.process_time()
        records = run(
            subject,
            contestants,
            [task],
            out=Path(folder),
            bandwidth=False,
            executor=executor,
            advance=seen.step,
            finish=seen.finish,
            allow=["equal results", "same results on other data"],
        )
        return len(records), time.perf_counter() - begin, time.process_time() - ran


def driver() -> None:
    """Print the cost of a cell without Ray, in processor time, which other programs change less than the clock."""
    for count in (250, 500, 1000):
        executor = _Timed()
        cells, _, ran = measure(executor, count)
        print(
            f"{cells} cells: {1e3 * (ran - executor.seconds) / cells:.2f} ms of processor time of the driver for each"
        )


def on_ray() -> None:
    """Print the cost of a cell on Ray."""
    for count in (250, 500, 1000):
        with connect("local") as executor:
            cells, seconds, ran = measure(executor, count)
        print(
            f"{cells} cells: {1e3 * seconds / cells:.2f} ms from one to the next, workers included; "
            f"{1e3 * ran / cells:.2f} ms of processor time of the driver, all of its threads together"
        )


def samples() -> None:
    """Print what making samples costs."""
    subject, contestants = Subject.load("demo"), contestants_of(PLANS)
    text = generated_text(400_000)
    for what, task in (
        ("perplexity, 50 windows of 640 tokens", Perplexity(text=text, source="generated text")),
        ("needle, 4 documents of 1,000 tokens", Needle(lengths=(1000,), depths=(0.1, 0.3, 0.5, 0.7, 0.9))),
    ):
        begin = time.perf_counter()
        made = len(list(task.samples(subject, contestants)))
        print(f"{what}: {1e3 * (time.perf_counter() - begin) / made:.0f} ms a sample")


def _none() -> None:
    """A call without work."""


def waiting() -> None:
    """Print how long it takes to learn of one outcome with many calls out."""
    import ray

    with connect("local") as executor:
        executor.submit(_none)
        executor.take()
        nothing = ray.remote(_none)
        never = ray.remote(num_cpus=1000)(_none)
        for out in (100, 1000, 10_000):
            rest = [never.remote() for _ in range(out)]
            begin = time.perf_counter()
            for _ in range(50):
                ready, _ = ray.wait([*rest, nothing.remote()], num_returns=1)
                ray.get(ready[0])
            waited = (time.perf_counter() - begin) / 50
            begin = time.perf_counter()
            for _ in range(50):
                executor.submit(_none)
                executor.take()
            print(
                f"{out} calls out: {1e3 * waited:.2f} ms by ray.wait, "
                f"{1e3 * (time.perf_counter() - begin) / 50:.2f} ms by callback"
            )
            for each in rest:
                ray.cancel(each)


def simulate(cost: float) -> None:
    """Print how busy workers are that one driver feeds, event by event.

    Args:
        cost: seconds of the driver for each cell, in which it does nothing else.
    """
    print(f"{1e3 * cost:.2f} ms a cell: one driver feeds {1 / cost:.0f} cells a second")
    print("| workers | cells of 1 s | of 10 s | of 60 s |")
    print("|---|---|---|---|")
    for workers in (10, 100, 300, 1000):
        busy = " | ".join(f"{100 * _busy(workers, length, cost):.0f} %" for length in (1.0, 10.0, 60.0))
        print(f"| {workers} | {busy} |")


def _busy(workers: int, length: float, cost: float, ahead: int = 2) -> float:
    """Share of their time that workers compute; each has one more cell waiting, as `Executor` gives it."""
    cells = 40 * workers
    queued, given, now = 0, 0, 0.0
    idle, ends = workers, list[float]()
    first = last = 0.0
    while given < cells or ends:
        # The driver gives out cells until its limit, and else takes the next that ended.
        if given < cells and queued + len(ends) < ahead * workers:
            now += cost / 2
            given, queued = given + 1, queued + 1
        else:
            now = max(now, ends[0]) + cost / 2
        while ends and ends[0] <= now:
            end = heapq.heappop(ends)
            last = max(last, end)
            # A waiting cell begins where one ended, without the driver.
            if queued:
                queued -= 1
                heapq.heappush(ends, end + length)
            else:
                idle += 1
        while queued and idle:
            queued, idle = queued - 1, idle - 1
            heapq.heappush(ends, now + length)
            first = first or now
    return cells * length / (workers * (last - first))


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["simulate"] and len(words) == 2:
        simulate(float(words[1]))
    elif len(words) == 1 and words[0] in ("driver", "ray", "samples", "waiting"):
        {"driver": driver, "ray": on_ray, "samples": samples, "waiting": waiting}[words[0]]()
    else:
        sys.exit(__doc__)
