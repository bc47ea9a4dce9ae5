"""NaN, infinity or too little memory for one plan is that plan's error; of 'full' NaN ends the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject
from tests.support.bench.frauds import TEXT, task
from tests.support.in_process import InProcess

from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.data.overlap import Calibrated
from kvtailor.bench.report import summarise
from kvtailor.bench.runner import TaskJob, run
from kvtailor.bench.schema import Record, read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import AllAtOnce, NotANumber, PlanByPlan, Sample, Scored, Turns
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.settings import Metric
from kvtailor.errors import KvtailorError

PLANS = [FULL, contestant("bad"), contestant("good")]
FIELDS: dict[str, dict[str, Any]] = {
    "metrics": {"metrics": {"score": math.nan}},
    "values": {"values": {"each": (0.5, math.inf)}},
    "timings": {"timings": {"ttft": {"median": math.nan, "q1": None}}},
    "held": {"held": {"traffic": {"hits": -math.inf}}},
    "floor": {"floor_seconds": math.inf},
}


@dataclass(frozen=True, kw_only=True)
class Odd(PlanByPlan):
    """Plans score 1 on three samples; one gives something that is not a number on the second."""

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric(name="score", unit="share"),)
    of: str = "bad"
    where: str = "metrics"
    at: str = "1"

    def points(self) -> int:
        return 3

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        for index in range(3):
            yield Sample(point={"index": index}, text="odd text", text_hash=str(index))

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        found = Scored(samples=1, metrics={"score": 1.0})
        return replace(found, **FIELDS[self.where]) if self._fails(contestant, sample) else found

    def _fails(self, contestant: Contestant, sample: Sample) -> bool:
        return contestant.label == self.of and sample.text_hash == self.at


@dataclass(frozen=True, kw_only=True)
class OddTogether(AllAtOnce):
    """The same where plans take turns, with the model's own cache among them."""

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[Metric, ...]] = Odd.metrics
    own_cache: ClassVar[bool] = True
    of: str = "bad"
    where: str = "metrics"

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        yield Sample(point={}, text="odd text", text_hash="1")

    def score_all(
        self, subject: Subject, contestants: Sequence[Contestant], sample: Sample, turns: Turns
    ) -> Mapping[str, Scored]:
        good, bad = Scored(samples=1, metrics={"score": 1.0}), Scored(samples=1, **FIELDS[self.where])
        return {each.hash: bad if each.label == self.of else good for each in contestants}


def model() -> Subject:
    return replace(subject(CountingModel(), bad=DummyCache(keep=13), good=DummyCache(keep=14)), elsewhere=model)


def go(*tasks: Any, plans: Sequence[Contestant] = PLANS, **options: Any) -> list[Record]:
    return run(model(), plans, tasks, bandwidth=False, **options)


@pytest.mark.parametrize("where", FIELDS)
@pytest.mark.parametrize("executor", [None, InProcess])
def test_a_plan_that_gives_no_number_has_an_error_and_the_others_go_on(
    where: str, executor: Any, tmp_path: Any
) -> None:
    made = None if executor is None else executor()
    records = go(Odd(where=where), out=tmp_path, executor=made)
    name = {"metrics": "score", "values": "each", "timings": "ttft", "held": "traffic", "floor": "floor_seconds"}[where]
    why = f"NaN or infinity came out as {name}"
    assert [(r.label, r.error) for r in records] == [
        *[("full", None), ("bad", None), ("good", None)],
        *[("full", None), ("bad", why), ("good", None)] * 2,
    ]
    assert len(read_records(tmp_path)) == 9


@pytest.mark.parametrize("where", FIELDS)
def test_so_has_one_that_takes_turns(where: str) -> None:
    records = go(OddTogether(where=where))
    assert [r.error is None for r in records] == [True, True, False, True]


@pytest.mark.parametrize("kind", [Odd, OddTogether])
@pytest.mark.parametrize("executor", [None, InProcess])
def test_of_full_it_ends_the_run_in_a_sentence(kind: Any, executor: Any) -> None:
    made = None if executor is None else executor()
    said = "perplexity on odd text, full, which every plan is compared with, so that the run ends: NaN or infinity came"
    with pytest.raises(KvtailorError, match=f"^{said} out as score$"):
        go(kind(of="full"), executor=made)


def test_of_the_models_own_cache_too() -> None:
    with pytest.raises(KvtailorError, match=f"odd text, {OWN.label}, which every plan is compared with"):
        go(OddTogether(of=OWN.label))


@dataclass(frozen=True, kw_only=True)
class Large(Odd):
    """One plan needs more memory than there is."""

    error: type[Exception] = MemoryError

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        if self._fails(contestant, sample):
            raise self.error("CUDA out of memory. Tried to allocate 3 GiB.\nMore.") if self.where else self.error()
        return Scored(samples=1, metrics={"score": 1.0})


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["metrics", ""])
def test_a_plan_that_needs_too_much_memory_has_an_error_too(error: type[Exception], where: str) -> None:
    records = go(Large(error=error, where=where))
    assert [(r.label, r.error is None) for r in records[3:6]] == [("full", True), ("bad", False), ("good", True)]
    said = " (CUDA out of memory. Tried to allocate 3 GiB.)" if where else ""
    assert str(records[4].error).startswith(f"the memory did not suffice{said}: ")


def test_a_suite_goes_on_with_its_next_task() -> None:
    jobs = [
        TaskJob(kind="perplexity", task=Odd(of=of, at="0"), contestants=tuple(PLANS), asked=f"perplexity({of})")
        for of in ("full", "nobody")
    ]
    records = go(*jobs, plans=())
    assert all("full, which every plan is compared with" in str(record.error) for record in records[:3])
    assert len(records) == 12 and not any(record.error for record in records[3:])


class Broken(CountingModel):
    """Its logits are NaN where a cache keeps 13 tokens, from some token on."""

    keeps: int | None = 13

    def logits(self, cache: DummyCache, ids: torch.Tensor) -> torch.Tensor:
        found = super().logits(cache, ids)
        return found * math.nan if cache.keep == self.keeps and cache.seen > 100 else found


@pytest.mark.parametrize("kind", ["perplexity", "fidelity"])
def test_logits_that_are_nan_under_one_plan_are_its_error(kind: str) -> None:
    asked = task() if kind == "perplexity" else Fidelity(text=TEXT, source="t", context=100, continuation=20, windows=5)
    found = run(replace(model(), model=Broken()), PLANS, [asked], bandwidth=False)
    assert [r.error for r in found] == [None, "the model gave a log-probability that is not a number", None]
    assert found[2].metrics
    told = f"bad has no number for {kind}: the model gave a log-probability that is not a number"
    assert told in summarise(found).footnotes


@pytest.mark.parametrize("kind", ["perplexity", "fidelity"])
def test_logits_that_are_nan_under_full_end_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken()
    broken.keeps = None
    monkeypatch.setattr(Subject, "not_a_number", lambda self, what: f"the model's own logits {what} are NaN: no")
    asked = task() if kind == "perplexity" else Fidelity(text=TEXT, source="t", context=100, continuation=20, windows=5)
    said = {
        "perplexity": "perplexity on wikitext, full, which every .*: the model's own logits of wikitext are NaN: no",
        "fidelity": "fidelity on t, full, which every .*: the model gave a log-probability that is not a number",
    }
    given = replace(model(), model=broken)
    with pytest.raises(KvtailorError, match=said[kind]):
        run(given, PLANS, [asked], bandwidth=False)


def test_a_loss_whose_perplexity_no_float_holds_is_an_error() -> None:
    class Sure(CountingModel):
        def logits(self, cache: DummyCache, ids: torch.Tensor) -> torch.Tensor:
            found = super().logits(cache, ids)
            return torch.eye(256)[cache.seen % 7].expand_as(found) * 5000 if cache.keep == 13 else found

    found = run(replace(model(), model=Sure()), PLANS, [task()], bandwidth=False)
    assert [r.error for r in found] == [None, "NaN or infinity came out as perplexity", None]


@pytest.mark.parametrize("executor", [None, InProcess])
@pytest.mark.parametrize("kind", ["perplexity", "fidelity"])
def test_a_plan_that_was_calibrated_on_the_text_is_left_out_and_the_others_go_on(kind: str, executor: Any) -> None:
    made = Calibrated.on(TEXT, name="ranks.safetensors", model="dummy", text_name="wikitext:test")
    plans = [FULL, replace(contestant("bad"), calibration=(made,)), contestant("good")]
    asked = task() if kind == "perplexity" else Fidelity(text=TEXT, source="t", context=100, continuation=20, windows=5)
    records = go(asked, plans=plans, executor=None if executor is None else executor())
    assert [r.error is None for r in records] == [True, False, True]
    assert str(records[1].error).startswith("calibration on the evaluated text: ranks.safetensors was made from wik")
    assert records[1].metrics == {}


def test_a_task_may_say_so_itself() -> None:
    class Saying(Odd):
        def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Any) -> Scored:
            if self._fails(contestant, sample):
                raise NotANumber("the answer is not a number")
            return Scored(samples=1, metrics={"score": 1.0})

    assert [r.error for r in go(Saying())].count("the answer is not a number") == 2
    with pytest.raises(KvtailorError, match="full, which every plan is compared with"):
        go(Saying(of="full"))
