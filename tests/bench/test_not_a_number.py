"""NaN, infinity or too little memory for one plan is that plan's error; of 'full' NaN ends the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
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
from kvtailor.bench.suite.run import Prepared
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
    "values beside timings": {"values": {"score": (math.nan,)}, "timings": {"score": {"median": 1.0}}},
    "metrics beside held": {"metrics": {"score": math.nan}, "held": {"score": 1.0}},
    "numpy": {"metrics": {"score": np.float32("nan")}},
    "torch": {"metrics": {"score": torch.tensor(math.nan)}},
    "array": {"values": {"score": torch.tensor([1.0, math.inf])}},
}
NAMES = {"values": "each", "timings": "ttft", "held": "traffic", "floor": "floor_seconds"}


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
    count: int = 1

    def points(self) -> int:
        return self.count

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        for index in range(1, self.count + 1):
            yield Sample(point={"index": index}, text="odd text", text_hash=str(index))

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
    why = str(NotANumber.of_results([NAMES.get(where, "score")]))
    assert why.startswith(f"NaN or infinity came out as {NAMES.get(where, 'score')}, and") and "dtype" in why
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
    said = "NaN or infinity of full, with which every plan is compared, in perplexity on odd text: NaN or infinity came"
    with pytest.raises(KvtailorError, match=f"^{said} out as score, and .*: ask for a dtype"):
        go(kind(of="full"), executor=made)


def test_of_the_models_own_cache_too() -> None:
    with pytest.raises(KvtailorError, match=f"^NaN or infinity of {OWN.label}, with which every plan is compared"):
        go(OddTogether(of=OWN.label))


@dataclass(frozen=True, kw_only=True)
class Large(Odd):
    """One plan needs more memory than there is."""

    error: Callable[..., Any] = MemoryError

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


def allocate(said: str = "") -> Any:
    return torch.empty(10**16)


@pytest.mark.parametrize("where", ["metrics", ""])
@pytest.mark.parametrize("executor", [None, InProcess])
def test_so_has_one_whose_tensor_the_processors_memory_does_not_hold(where: str, executor: Any) -> None:
    made = None if executor is None else executor()
    records = go(Large(error=allocate, where=where), executor=made)
    assert [r.label for r in records if r.error] == ["bad", "bad"]
    assert "DefaultCPUAllocator" in str(records[4].error) and str(records[4].error).startswith("the memory did not suf")


def broken(said: str = "") -> Any:
    raise RuntimeError("a fault of the program")


def test_any_other_runtime_error_ends_the_run_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="^a fault of the program$"):
        go(Large(error=broken))


@dataclass(frozen=True, kw_only=True)
class LargeTogether(OddTogether):
    """The memory does not suffice: in the turn of one plan, outside of any, or for the samples."""

    place: str = "turn"

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        if self.place == "samples":
            allocate()
        yield from super().samples(subject, contestants)

    def score_all(
        self, subject: Subject, contestants: Sequence[Contestant], sample: Sample, turns: Turns
    ) -> Mapping[str, Scored]:
        if self.place == "outside":
            allocate()
        TRIED.append([each.label for each in contestants])
        found = {}
        for each in contestants:
            with turns(each) as live:
                assert live, "one that failed before is tried again"
                if each.label == self.of:
                    allocate()
                found[each.hash] = Scored(samples=1, metrics={"score": 1.0})
        return found


TRIED: list[list[str]] = []


@pytest.mark.parametrize("executor", [None, InProcess])
def test_one_that_takes_turns_and_failed_is_not_tried_on_the_samples_that_follow(executor: Any) -> None:
    TRIED.clear()
    records = go(LargeTogether(count=2), executor=None if executor is None else executor())
    assert [r.label for r in records if r.error] == ["bad", "bad"] and len(records) == 8
    assert records[2].error == records[6].error
    if executor is None:
        assert [[OWN.label, "full", "bad", "good"], [OWN.label, "full", "good"]] == TRIED


@pytest.mark.parametrize("executor", [None, InProcess])
@pytest.mark.parametrize("place", ["outside", "samples"])
def test_too_little_memory_for_what_plans_share_ends_the_task_in_a_sentence(place: str, executor: Any) -> None:
    text = " on odd text" if place == "outside" else ""
    said = f"^perplexity{text}, in what all plans share: the memory did not suffice .*: a shorter context"
    with pytest.raises(KvtailorError, match=said):
        go(LargeTogether(place=place), executor=None if executor is None else executor())
    jobs = [
        TaskJob(kind="perplexity", task=each, contestants=tuple(PLANS), asked=str(number))
        for number, each in enumerate([LargeTogether(place=place), Odd(of="nobody")])
    ]
    records = go(*jobs, plans=(), executor=None if executor is None else executor())
    assert [r.label for r in records if r.error] == ["full", "bad", "good"] and len(records) == 12


@pytest.mark.parametrize("executor", [None, InProcess])
@pytest.mark.parametrize("at", ["0", "1"])
def test_a_suite_goes_on_with_its_next_task(at: str, executor: Any) -> None:
    jobs = [
        TaskJob(kind="perplexity", task=Odd(of=of, at=at), contestants=tuple(PLANS), asked=f"perplexity({of})")
        for of in ("full", "nobody")
    ]
    records = go(*jobs, plans=(), executor=None if executor is None else executor())
    mine = [record for record in records if record.asked == "perplexity(full)"]
    wrong = [record for record in mine if record.error is not None]
    assert [record.label for record in wrong] == ["full", "bad", "good"]
    assert all("full, with which every plan is compared" in str(record.error) for record in wrong)
    assert executor is not None or len(mine) == 3 + 3 * int(at), "of samples before it the numbers stay"
    assert not any(record.error for record in records if record not in mine) and len(records) == len(mine) + 9


def test_of_a_suite_the_models_own_cache_can_fail_too() -> None:
    task = LargeTogether(of=OWN.label)
    job = TaskJob(kind="perplexity", task=task, contestants=tuple(PLANS), asked="perplexity()")
    suite: Any = None
    prepared = Prepared(suite=suite, subject=model(), jobs=(job,), contestants=tuple(PLANS), unavailable=())
    assert [record.label for record in prepared.failed(go(job, plans=()))] == [OWN.label]


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
    assert [r.error for r in found] == [None, str(NotANumber.of_logits()), None]
    assert found[2].metrics
    told = f"bad has no number for {kind}: {NotANumber.of_logits()}"
    assert told in summarise(found).footnotes


@pytest.mark.parametrize("kind", ["perplexity", "fidelity"])
def test_logits_that_are_nan_under_full_end_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken()
    broken.keeps = None
    monkeypatch.setattr(Subject, "not_a_number", lambda self, what: f"the model's own logits {what} are NaN: no")
    asked = task() if kind == "perplexity" else Fidelity(text=TEXT, source="t", context=100, continuation=20, windows=5)
    said = {
        "perplexity": "full, .*, in perplexity on wikitext: the model's own logits of wikitext are NaN: no",
        "fidelity": "full, .*, in fidelity on t: the model gave a log-probability that is not a number: ask for",
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
    assert [r.error for r in found] == [None, str(NotANumber.of_results(["perplexity"])), None]


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
    with pytest.raises(KvtailorError, match="full, with which every plan is compared"):
        go(Saying(of="full"))
