"""Every task, and every preset, is pickled for another process and gives there what it gives here."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.bench.harness_fixtures import folder
from tests.support.bench.longset_rows import lines_to, longbench_row
from tests.support.in_process import InProcess

from kvtailor.bench import remote_cell
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.ask import Ask
from kvtailor.bench.tasks.capacity import Capacity
from kvtailor.bench.tasks.contract import Task
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.harness import Harness
from kvtailor.bench.tasks.longcontext import LongContext
from kvtailor.bench.tasks.memory import Memory
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.reasoning import Reasoning
from kvtailor.bench.tasks.speculation import Speculation
from kvtailor.bench.tasks.speed import Speed
from kvtailor.errors import PlanError
from kvtailor.plan import registry

PLANS = ["snapkv @ keep=0.25", "kivi(bits=4)"]
# What no two runs have in common: times, and bytes of a process.
MAY_DIFFER = (
    "run",
    "started",
    "machine",
    "wall_seconds",
    "timings",
    "floor_seconds",
    "samples",
    "bytes_resident",
    "bytes_peak",
    "bytes_peak_decode",
    "prefill_compared",
)


class Pickled(InProcess):
    """Everything goes through bytes, as to another process and back; and each cell finds a fresh one."""

    def submit(self, *call: Any, **more: Any) -> None:
        function, *arguments = pickle.loads(pickle.dumps(call))

        def answered(*given: Any) -> Any:
            remote_cell._JOBS.clear()
            return pickle.loads(pickle.dumps(function(*given)))

        super().submit(answered, *arguments, **more)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.load("demo")


def made(name: str, data: Path) -> Task:
    text: dict[str, Any] = {"text": generated_text(6000), "source": "generated text"}
    if name == "longcontext":
        rows = [longbench_row(f"Text {i}. " + "lorem ipsum " * 30, ["Paragraph 7"], _id=f"n{i}") for i in range(2)]
        lines_to(data / "longbench" / "passage_retrieval_en.jsonl", rows)
    tasks = {
        "perplexity": lambda: Perplexity(**text, context=100, continuation=20, windows=3),
        "ask": lambda: Ask(length=256, questions=2, documents=2),
        "needle": lambda: Needle(lengths=(200,), depths=(0.1, 0.9), documents=2),
        "fidelity": lambda: Fidelity(**text, context=100, continuation=20, windows=2),
        "speed": lambda: Speed(**text, context=32, tokens=2, rounds=1, warmup=0),
        "memory": lambda: Memory(context=64, caches=1),
        "capacity": lambda: Capacity(memory_bytes=2**40, context=64, step=64, reach=256),
        "speculation": lambda: Speculation(**text, context=32, tokens=3, rounds=1, warmup=0, draft="demo-draft"),
        "reasoning": lambda: Reasoning(kind="walk", counts=(2,), prompt=200, chains=2),
        "longcontext": lambda: LongContext(
            benchmark="longbench", subset="passage_retrieval_en", data=data, max_tokens=200
        ),
        "harness": lambda: Harness(task="arc_easy", data=folder(data, random.Random(0)), limit=3, outside=1),
    }
    return tasks[name]()


def told(record: Record, *, exclusive: bool) -> dict[str, Any]:
    left = ("metrics", "values", "notes") if exclusive else ()
    found = json.loads(record.to_json())
    return {name: value for name, value in found.items() if name not in (*MAY_DIFFER, *left)}


SLOW = ("memory", "capacity", "longcontext", "harness", "speculation")


@pytest.mark.usefixtures("few_harness_tasks")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in KINDS]
)
def test_a_task_gives_the_same_in_another_process(name: str, subject: Subject, tmp_path: Path) -> None:
    if name == "harness":
        pytest.importorskip("lm_eval")
    task = made(name, tmp_path)
    alone = run(subject, contestants_of(PLANS), [task], bandwidth=False)
    there = run(subject, contestants_of(PLANS), [task], bandwidth=False, executor=Pickled())
    exclusive = task.exclusive
    assert [told(r, exclusive=exclusive) for r in there] == [told(r, exclusive=exclusive) for r in alone]
    assert all(record.error is None for record in alone), [record.error for record in alone]


def test_every_preset_travels() -> None:
    found = 0
    for name in registry.presets():
        try:
            one = Contestant.of(f"{name} @ keep=0.5")
        except PlanError:
            one = Contestant.of(name)
        assert pickle.loads(pickle.dumps(one)) == one
        found += 1
    assert found > 20
