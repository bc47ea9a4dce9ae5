"""Calls on a Ray cluster of a head and two one-CPU nodes on this machine, with token authentication."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from tests.cluster import calls  # noqa: E402
from tests.cluster.deadly import Deadly  # noqa: E402
from tests.support.ray_cluster import cluster_of  # noqa: E402

from kvtailor.bench.runner import contestants_of, run  # noqa: E402
from kvtailor.bench.subject import Subject  # noqa: E402
from kvtailor.cluster import Executor, Resources, connect  # noqa: E402
from kvtailor.errors import ArgumentError  # noqa: E402

pytestmark = pytest.mark.always
TIMED = Resources(exclusive=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(2) as (found, _), connect(found.address):
        yield found


@pytest.fixture
def executor(cluster: Any) -> Iterator[Executor]:
    with connect() as found:
        yield found
        assert not found.pending


def values(executor: Executor, count: int) -> list[Any]:
    """The values of so many calls, by the numbers that are their tags."""
    found = [executor.take() for _ in range(count)]
    assert [each.failure for each in found if each.failure] == []
    return [each.value for each in sorted(found, key=lambda each: each.tag)]


def test_values_come_back_and_a_process_runs_many_calls(executor: Executor) -> None:
    shared = executor.share("a text" * 100_000)
    for number in range(12):
        executor.submit(calls.process, shared, tag=number)
    assert executor.pending == 12 and not executor.has_room
    found = values(executor, 12)
    assert executor.has_room
    assert {length for _, _, length in found} == {600_000}
    processes = {pid for pid, _, _ in found}
    assert os.getpid() not in processes and len(processes) <= 3, "a worker is to run many calls"
    with pytest.raises(ArgumentError, match="no call is pending"):
        executor.take()


def test_each_machine_is_asked_once(executor: Executor) -> None:
    found = executor.on_each_machine(calls.process)
    assert len({outcome.value[1] for outcome in found}) == len(found) == 2
    assert len({outcome.machine for outcome in found}) == 2


def test_a_call_that_fails_says_why_and_is_not_begun_again(executor: Executor) -> None:
    executor.submit(calls.dies, tag="dies")
    executor.submit(calls.fails, "no luck", tag="fails")
    found = {outcome.tag: outcome for outcome in (executor.take() for _ in range(2))}
    assert found["dies"].failure == (
        "its worker process died: it was killed (by the kernel, where memory ran out), or it crashed"
    )
    assert found["fails"].failure == "RuntimeError: no luck" and found["fails"].machine
    assert not executor.pending and not any(outcome.hopeless for outcome in found.values())


@pytest.mark.long
def test_a_plan_that_kills_its_workers_twice_is_the_only_one_without_numbers(
    executor: Executor, tmp_path: Path
) -> None:
    contestants = contestants_of(["kivi(bits=4)", "snapkv @ keep=0.25"])
    task = Deadly(always="kivi(bits=4)", once="snapkv @ keep=0.25", folder=tmp_path)
    found = run(Subject.load("demo"), contestants, [task], bandwidth=False, executor=executor)
    assert [(record.label, record.point["index"]) for record in found] == [
        (each.label, index) for index in range(2) for each in contestants
    ]
    [dead] = [record for record in found if record.error is not None]
    assert (dead.label, dead.point["index"]) == ("kivi(bits=4)", 0)
    assert str(dead.error).startswith("It failed 2 times: its worker process died: it was killed (by the kernel")
    assert list(tmp_path.iterdir()), "the other plan killed nobody: this test shows less than it says"


def test_timed_calls_have_a_machine_to_themselves(executor: Executor) -> None:
    timed = range(3, 7)
    for number in range(10):
        if number in timed:
            executor.submit(calls.span, 0.4, resources=TIMED, tag=number)
        else:
            executor.submit(calls.span, 0.2, tag=number)
    spans = dict(enumerate(values(executor, 10)))
    for number, (begin, end, node) in spans.items():
        beside = [
            other
            for other, (b, e, n) in spans.items()
            if other != number and n == node and b < end and begin < e and (number in timed or other in timed)
        ]
        assert not beside, f"{number} ran beside {beside}"
    assert len({spans[number][2] for number in timed}) == 2, "both machines are to be used"


@pytest.mark.long
def test_what_no_machine_has_is_refused_in_a_sentence_and_given_up(cluster: Any) -> None:
    with Executor(patience=1.0) as impatient:
        assert impatient.why_not(Resources()) is None
        assert "asked for 4 CPUs, but no machine of the cluster has that much: of 2 the largest" in str(
            impatient.why_not(Resources(cpus=4))
        )
        impatient.submit(calls.process, resources=Resources(cpus=4))
        impatient.submit(calls.process, resources=Resources(cpus=4, exclusive=True))
        for _ in range(2):
            outcome = impatient.take()
            assert "no machine could run it: asked for 4 CPUs" in str(outcome.failure) and outcome.hopeless


@pytest.mark.long
def test_what_is_running_is_cancelled_at_the_end(cluster: Any, tmp_path: Any) -> None:
    with Executor() as executor:
        executor.submit(calls.span, 600.0)
        executor.submit(calls.span, 600.0, resources=TIMED)
        time.sleep(1.5)
    with Executor() as executor:
        for number in range(2):
            executor.submit(calls.process, resources=TIMED, tag=number)
        values(executor, 2)


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    done = elsewhere("127.0.0.1:9")
    assert "asked for the Ray cluster '127.0.0.1:9', which cannot be reached: [Errno 111]" in done, done


@pytest.mark.long
def test_another_token_is_refused(cluster: Any) -> None:
    done = elsewhere(cluster.address, RAY_AUTH_TOKEN="another")
    assert f"asked for the Ray cluster {cluster.address!r}, which cannot be reached" in done, done
    assert "token" in done, done


def elsewhere(address: str, **more: str) -> str:
    """What a process that connects writes to standard error."""
    code = f"from kvtailor.cluster import connect\nconnect({address!r})\nprint('connected')"
    given = {**os.environ, **more, "RAY_gcs_server_request_timeout_seconds": "5"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=given
    )
    assert not done.stdout, done.stdout
    return done.stderr
