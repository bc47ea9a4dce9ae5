"""A task that tests run in workers: plans kill the process that scores them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored
from kvtailor.bench.tasks.settings import Metric


@dataclass(frozen=True, kw_only=True)
class Deadly(PlanByPlan):
    """Sample i scores i. On sample 0 one plan kills its process each time, and another one the first time."""

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric(name="score", unit="share"),)
    always: str
    once: str
    folder: Path

    def points(self) -> int:
        return 2

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        for index in range(2):
            yield Sample(point={"index": index}, text="numbers", text_hash=str(index))

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        mark = self.folder / "killed once"
        first = contestant.label == self.once and not mark.exists()
        if sample.text_hash == "0" and (first or contestant.label == self.always):
            if first:
                mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Scored(samples=1, metrics={"score": float(str(sample.text_hash))})
