"""Cells on an executor give the records of a run alone, in whatever order they end and however often they are begun."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject
from tests.support.in_process import InProcess

from kvtailor.bench import remote_cell
from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.measure import machine
from kvtailor.bench.resources import CellResources
from kvtailor.bench.runner import TaskJob, plan_run, run
from kvtailor.bench.schema import Record, read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.settings import Metric
from kvtailor.bench.tasks.speed import Speed
from kvtailor.cluster import CallOutcome, Resources
from kvtailor.errors import KvtailorError

PLANS = [FULL, contestant("one"), contestant("other")]
VERSIONS = {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}


@pytest.fixture(autouse=True)
def same_versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A checkout with changed files is dirty, and then nothing is reused."""
    monkeypatch.setattr(machine, "versions", lambda: dict(VERSIONS))
    remote_cell.machine_here.cache_clear()
    remote_cell._MODELS.clear()
    remote_cell._JOBS.clear()
    yield
    remote_cell.machine_here.cache_clear()
    remote_cell._MODELS.clear()
    remote_cell._JOBS.clear()


def model() -> Subject:
    return replace(subject(CountingModel(), one=DummyCache(keep=20), other=DummyCache(keep=21)), elsewhere=model)


class Shuffled(InProcess):
    """Ends calls in any order. Workers die now and then; what they did until then is lost.

    Attributes:
        begun: the jobs and cells that were begun, each as often as it was, and why it had failed before.
        resources: what was asked for, in order.
        spares: calls that only make samples never die.
    """

    def __init__(self, state: int, deaths: float = 0.0, at_once: int = 6, spares: bool = True):
        super().__init__()
        self.spares = spares
        self._random, self._deaths, self._at_once = random.Random(state), deaths, at_once
        self.begun: list[Any] = []
        self.resources: list[Resources] = []

    @property
    def plans_begun(self) -> int:
        return sum(len(cell.blanks) for _, cell, _ in self.begun)

    @property
    def has_room(self) -> bool:
        return len(self.calls) < self._at_once

    def submit(self, *call: Any, **more: Any) -> None:
        super().submit(*call, **more)
        self.resources.append(self.calls[-1].resources)

    def take(self) -> CallOutcome:
        self.calls.rotate(self._random.randrange(len(self.calls)))
        call = self.calls.popleft()
        makes_samples = call.function is remote_cell.describe_samples
        if not makes_samples:
            self.begun.append(call.tag)
        outcome = self.outcome_of(call)
        if not (makes_samples and self.spares) and self._random.random() < self._deaths:
            # It had done all of its work by then.
            return CallOutcome(tag=call.tag, failure="its worker process died")
        return outcome


def tasks() -> list[Any]:
    text = generated_text(4000)
    return [
        Perplexity(text=text, source="generated text", context=100, continuation=20, windows=6),
        Needle(lengths=(300, 400), depths=(0.0, 1.0), documents=2),
    ]


def results(records: Sequence[Record]) -> list[Record]:
    """Everything but what may differ: run, times and machine."""
    return [replace(each, run="", started="", machine={}, wall_seconds=None) for each in records]


def go(
    asked: Sequence[Any] | None = None, executor: Any = None, plans: Sequence[Contestant] = PLANS, **options: Any
) -> list[Record]:
    counted: list[str] = []
    asked = tasks() if asked is None else asked
    # These executors compute in the threads of this process, whatever a cell asks for.
    options.setdefault("resources", CellResources(usual={"cpus": float(torch.get_num_threads())}))
    found = run(model(), plans, asked, bandwidth=False, advance=counted.append, executor=executor, **options)
    assert len(counted) == plan_run(asked, plans)[1]
    return found


@pytest.mark.parametrize("state", range(4))
def test_records_are_those_of_a_run_alone(state: int) -> None:
    alone = go()
    assert results(go(executor=InProcess())) == results(alone)
    assert results(go(executor=Shuffled(state))) == results(alone)


@pytest.mark.parametrize("state", range(6))
def test_workers_that_die_lose_and_double_nothing(state: int, tmp_path: Any) -> None:
    alone, executor = go(), Shuffled(state, deaths=0.5)
    found = go(executor=executor, out=tmp_path)
    assert executor.plans_begun > len(alone), "no worker died: this test shows nothing"
    written = read_records(tmp_path)
    assert sorted(r.key for r in written) == sorted(r.key for r in alone)
    for one, other in zip(results(found), results(alone), strict=True):
        if one.error is not None:
            assert one.error == "It failed 2 times: its worker process died."
            assert replace(one, error=None) == replace(
                other, error=None, **{name: getattr(one, name) for name in _RESULTS}
            )
        else:
            assert one == other
    # A second run, on which nobody dies, measures those alone that have no numbers.
    again = Shuffled(state)
    assert results(go(executor=again, out=tmp_path)) == results(alone)
    assert again.plans_begun == sum(record.error is not None for record in found)


_RESULTS = [
    name
    for name in Record.__dataclass_fields__
    if name.startswith(("bytes_", "tokens_"))
    or name in ("samples", "metrics", "values", "rounding", "reads_held", "notes", "traffic")
]


@dataclass(frozen=True, kw_only=True)
class Numbered(PlanByPlan):
    """Sample i of plan p scores i; a plan may fail on one sample."""

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric(name="score", unit="share"),)
    fails: tuple[tuple[str, int], ...] = ()
    crashes: tuple[tuple[str, int], ...] = ()

    def points(self) -> int:
        return 4

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        for index in range(4):
            yield Sample(point={"index": index}, text="numbers", text_hash=str(index), data={}, notes=("A note.",))

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        index = int(str(sample.text_hash))
        if (contestant.label, index) in self.crashes:
            raise RuntimeError("CUDA error: an illegal memory access")
        if (contestant.label, index) in self.fails:
            raise KvtailorError(f"failed on {index}")
        return Scored(samples=1, metrics={"score": float(index)})


@pytest.mark.parametrize("state", range(5))
def test_a_plan_that_failed_is_not_tried_on_the_samples_that_follow(state: int, tmp_path: Any) -> None:
    task = Numbered(fails=(("one", 1), ("one", 3), ("other", 0)))
    alone = go([task])
    assert [r.error for r in alone if r.label == "one"] == [None, "failed on 1", "failed on 1", "failed on 1"]
    found = go([task], Shuffled(state), out=tmp_path)
    assert results(found) == results(alone)
    assert len(read_records(tmp_path)) == len(alone)


def test_a_cell_that_fails_twice_has_the_reason_and_condemns_no_other_one() -> None:
    found = go([Numbered(crashes=(("one", 1),))], Shuffled(0))
    [(label, point, error)] = [(r.label, r.point, str(r.error)) for r in found if r.error is not None]
    assert (label, point) == ("one", {"index": 1})
    assert error.startswith("It failed 2 times: RuntimeError: CUDA error: an illegal memory access (on ")
    assert len(found) == 12


def test_a_cell_has_a_few_plans_of_one_sample_and_a_death_parts_them() -> None:
    """What a worker has prefilled serves all of them; one that kills it is the only one without numbers."""
    plans = [FULL, *(contestant(f"plan {number}") for number in range(5))]
    caches = {plan.label: DummyCache(keep=20 + number) for number, plan in enumerate(plans[1:])}

    def made() -> Subject:
        return replace(subject(CountingModel(), **caches), elsewhere=made)

    for crashes in ((), (("plan 1", 2),)):
        executor = Shuffled(0)
        found = run(made(), plans, [Numbered(crashes=crashes)], bandwidth=False, executor=executor)
        assert [(r.label, r.point["index"]) for r in found if r.error] == [*crashes]
        sizes = [len(cell.blanks) for _, cell, before in executor.begun if not before]
        assert sorted(sizes) == sorted([4, 2] * 4 + [1] * 4 * len(crashes))
        assert {(r.label, r.point["index"]) for r in found} == {(p.label, n) for p in plans for n in range(4)}
        remote_cell._MODELS.clear()
        remote_cell._JOBS.clear()


def test_a_worker_makes_the_samples_of_a_job_once_and_goes_on_with_those_it_has() -> None:
    class Counted(Numbered):
        made: ClassVar[list[str]] = []

        def samples(self, subject: Any, contestants: Any) -> Iterator[Sample]:
            for sample in super().samples(subject, contestants):
                self.made.append(str(sample.text_hash))
                yield sample

    go([Counted()], InProcess())
    # Once for their hashes, and once for all cells.
    assert Counted.made == ["0", "1", "2", "3"] * 2
    assert len(remote_cell._MODELS) == len(remote_cell._JOBS) == 1


def test_a_run_that_ends_early_leaves_no_call_behind() -> None:
    """A search goes on with the executor, whose next outcome must be of a call of its own."""

    class Fooled(Numbered):
        def score(self, subject: Any, contestant: Any, sample: Any, advance: Any) -> Scored:
            raise Fraud("identity", "nothing is what it seems")

    executor = Shuffled(0)
    with pytest.raises(Fraud):
        go([Fooled()], executor)
    assert not executor.pending
    assert results(go([Numbered()], executor)) == results(go([Numbered()]))


@dataclass(frozen=True, kw_only=True)
class Remembering(Numbered):
    """Every plan's score is that of 'full', which it must know."""

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        if contestant.is_full:
            sample.data["full"] = 10.0 + int(str(sample.text_hash))
        return Scored(samples=1, metrics={"score": sample.data["full"]}, values={"score": (sample.data["full"],)})

    def recall(self, contestant: Contestant, sample: Sample, values: Any) -> None:
        if contestant.is_full:
            sample.data["full"] = values["score"][0]


@pytest.mark.parametrize("state", range(4))
def test_plans_that_must_know_another_ones_values_wait_for_them(state: int, tmp_path: Any) -> None:
    alone = go([Remembering()])
    executor = Shuffled(state)
    found = go([Remembering()], executor, out=tmp_path)
    assert results(found) == results(alone)
    assert [r.metrics["score"] for r in found if r.label == "one"] == [10.0, 11.0, 12.0, 13.0]
    # What is known from before is told to the others, too.
    for file in tmp_path.glob("*.jsonl"):
        file.write_text("".join(x for x in file.read_text().splitlines(True) if '"label": "full"' in x))
    remote_cell._JOBS.clear()
    assert results(go([Remembering()], Shuffled(state), out=tmp_path)) == results(alone)


def test_samples_that_cannot_be_made_twice_are_the_reason_of_every_plan() -> None:
    found = run(model(), PLANS, [Numbered()], bandwidth=False, executor=Shuffled(0, deaths=1.0, spares=False))
    assert [(r.label, r.error) for r in found] == [
        (each.label, "It failed 2 times: its worker process died.") for each in PLANS
    ]


def test_a_fraud_ends_the_run() -> None:
    class Fooled(Numbered):
        def score(self, subject: Any, contestant: Any, sample: Any, advance: Any) -> Scored:
            raise Fraud("identity", "nothing is what it seems")

    with pytest.raises(Fraud, match="^identity: nothing is what it seems$"):
        go([Fooled()], InProcess())


def test_a_task_that_cannot_be_done_ends_a_run_and_not_a_suite() -> None:
    class Undone(Numbered):
        def samples(self, subject: Any, contestants: Any) -> Iterator[Sample]:
            yield next(super().samples(subject, contestants))
            raise KvtailorError("no more samples")

    with pytest.raises(KvtailorError, match="no more samples"):
        go([Undone()], InProcess())
    job = TaskJob(kind="perplexity", task=Undone(), contestants=tuple(PLANS), asked="perplexity()")
    other = TaskJob(kind="perplexity", task=Numbered(), contestants=tuple(PLANS), asked="perplexity(state=1)")
    alone = go([job, other], plans=())
    found = go([job, other], InProcess(), plans=())
    assert results(found) == results(alone)


def test_timed_cells_ask_for_a_machine_and_come_last_with_all_plans() -> None:
    text = generated_text(1000)
    speed = Speed(text=text, source="generated text", context=20, tokens=2, rounds=1, warmup=0)
    executor = Shuffled(0)
    asked = CellResources(usual={"cpus": 2.0}, by_task={"speed": {"gpus": 1.0}})
    found = go([speed, *tasks()], executor, resources=asked)
    assert [each for each in executor.resources if each.exclusive] == [Resources(cpus=2.0, gpus=1.0, exclusive=True)]
    assert executor.resources[-1].exclusive and executor.resources[0] == Resources(cpus=2.0)
    assert [r.task for r in found[:4]] == ["speed"] * 4
    assert {len(cell.blanks) for job, cell, _ in executor.begun if job.task is speed} == {4}


def test_plans_that_are_compared_in_one_process_stay_together() -> None:
    task = Fidelity(text=generated_text(2000), source="generated text", context=40, continuation=10, windows=2)
    assert results(go([task], Shuffled(0))) == results(go([task]))


def test_records_tell_the_machine_that_made_them() -> None:
    assert all("host" in record.machine for record in go([Numbered()], InProcess()))
    assert not any("host" in record.machine for record in go([Numbered()]))


def test_records_of_a_machine_that_is_not_there_are_measured_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go([Numbered()], InProcess(), out=tmp_path)
    executor = Shuffled(0)
    go([Numbered()], executor, out=tmp_path)
    assert not executor.begun
    describe = machine.describe
    monkeypatch.setattr(machine, "describe", lambda **given: {**describe(**given), "processor": "another one"})
    remote_cell.machine_here.cache_clear()
    go([Numbered()], executor, out=tmp_path)
    assert executor.plans_begun == 12


def test_records_of_another_number_of_threads_are_measured_again(tmp_path: Any) -> None:
    """A cell computes in as many threads as it has processors, and those round differently."""
    go([Numbered()], InProcess(), out=tmp_path)
    executor = Shuffled(0)
    more = CellResources(usual={"cpus": torch.get_num_threads() + 1.0})
    go([Numbered()], executor, out=tmp_path, resources=more)
    assert executor.plans_begun == 12


def test_another_model_or_other_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> Subject:
        return replace(model(), name="other", model=type("Other", (CountingModel,), {"device": "meta"})())

    with pytest.raises(KvtailorError, match="is another model here: fingerprint None, float32 on meta, and not"):
        run(replace(model(), elsewhere=other), PLANS, [Numbered()], bandwidth=False, executor=InProcess())
    with pytest.raises(KvtailorError, match="no other process can load it"):
        run(replace(model(), elsewhere=None), PLANS, [Numbered()], bandwidth=False, executor=InProcess())

    class Elsewhere(InProcess):
        def on_each_machine(self, function: Any, *arguments: Any, gpus: float = 0.0) -> list[CallOutcome]:
            [here] = super().on_each_machine(function, *arguments)
            return [here, replace(here, machine="b", value={**here.value, "torch": "1"})]

    with pytest.raises(KvtailorError, match="b has torch 1 and not 2"):
        run(model(), PLANS, [Numbered()], bandwidth=False, executor=Elsewhere())


def test_other_samples_are_refused() -> None:
    class Drifting(Numbered):
        made: ClassVar[list[int]] = []

        def samples(self, subject: Any, contestants: Any) -> Iterator[Sample]:
            self.made.append(0)
            for sample in super().samples(subject, contestants):
                yield replace(sample, text_hash=f"{sample.text_hash}{len(self.made)}")

    with pytest.raises(KvtailorError, match="give all machines the same data and packages"):
        go([Drifting()], InProcess())
