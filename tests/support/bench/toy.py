"""A toy task as the text of its one file, and what makes a folder of tasks out of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kvtailor.bench import tasks
from kvtailor.bench.declared import found_kinds
from kvtailor.bench.kinds import KINDS

TOY = '''"""Toy: how much of each of some prompts a cache still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import torch

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.subject import Subject, hash_of
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored
from kvtailor.bench.tasks.settings import CONTEXTS, Metric, setting


@dataclass(frozen=True, kw_only=True)
class Toy(PlanByPlan):
    """Prompts of random tokens.

    Attributes:
        context: tokens of a prompt.
        prompts: how many at each of the points.
        points_wanted: how many points.
    """

    name: ClassVar[str] = "toy"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="kept_share", unit="share", higher_is_better=True, mean_of="kept", meaning="held over seen"),
        Metric(name="prompts_fed", unit="prompts"),
    )
    values: ClassVar[tuple[str, ...]] = ("kept",)
    by_sample: ClassVar[bool] = True
    context: int = setting(40, option=CONTEXTS, each=True, counts_tokens=True)
    prompts: int = setting(6, option="--toy-prompts", help="Prompts of the toy at each point.")
    points_wanted: int = setting(2)

    def points(self) -> int:
        return self.points_wanted

    def steps(self) -> int:
        return self.points() * self.prompts

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        for state in range(self.points()):
            ids = torch.randint(3, 90, (self.prompts, self.context), generator=torch.Generator().manual_seed(state))
            yield Sample(point={"context": self.context, "place": state}, text="random tokens", text_hash=hash_of(ids),
                         state=state, steps=self.prompts, data=ids)

    def score(
        self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]
    ) -> Scored:
        kept, weight = [], {}
        for row in sample.data:
            _, cache = subject.prefill(row[None], subject.new_cache(contestant), last_only=True)
            weight = weigh(cache)
            kept.append(weight["tokens_held"] / weight["tokens_seen"])
            advance()
        return Scored(samples=len(kept), metrics={"kept_share": fmean(kept), "prompts_fed": len(kept)},
                      values={"kept": kept}, held=weight)
'''


def write_task(folder: Path, text: str = TOY, name: str = "toy") -> Path:
    """The file of a task in a folder of its own."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def install(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """As if the file lay beside the others."""
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(path.parent)])
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, f"{tasks.__name__}.{path.stem}", raising=False)
    monkeypatch.setitem(KINDS, path.stem, found_kinds()[path.stem])
