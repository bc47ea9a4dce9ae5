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
from tests.support.ray_cluster import cluster_of  # noqa: E402

from kvtailor.cluster.connect import connect  # noqa: E402
from kvtailor.cluster.contract import Call, Executor, Resources  # noqa: E402
from kvtailor.cluster.on_ray import OnRay  # noqa: E402

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


def values(executor: Executor, *asked: Call) -> list[Any]:
    for call in asked:
        executor.submit(call)
    found = [executor.take() for _ in asked]
    assert [each.failure for each in found if each.failure] == []
    return [each.value for each in sorted(found, key=lambda each: asked.index(each.call))]


def test_values_come_back_and_a_worker_keeps_what_is_shared(executor: Executor) -> None:
    shared = executor.share("a text" * 100_000)
    asked = [Call(function=calls.process, arguments=(shared,), tag=i) for i in range(12)]
    found = values(executor, *asked)
    by_process = {pid: {value for other, _, value in found if other == pid} for pid, _, _ in found}
    assert all(len(kept) == 1 for kept in by_process.values()) and os.getpid() not in by_process
    assert len(by_process) <= 3, "a worker is to run many calls"


def test_each_machine_is_asked_once(executor: Executor) -> None:
    found = executor.on_each_machine(calls.process)
    assert len({outcome.value[1] for outcome in found}) == len(found) == 2
    assert len({outcome.machine for outcome in found}) == 2


@pytest.mark.long
def test_a_call_whose_worker_was_killed_is_begun_again_and_given_up_the_second_time(
    executor: Executor, tmp_path: Any
) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    executor.submit(Call(function=calls.dies, arguments=(str(tmp_path / "once"), 1), tag="once"))
    executor.submit(Call(function=calls.dies, arguments=(str(tmp_path / "twice"), 2), tag="twice"))
    executor.submit(Call(function=calls.fails, arguments=("no luck",), tag="fails"))
    found = {outcome.call.tag: outcome for outcome in (executor.take() for _ in range(3))}
    assert (found["once"].value, found["once"].attempts) == (1, 2)
    assert found["twice"].failure == (
        "It failed 2 times: its worker process died: it was killed (by the kernel, where memory ran out), or it "
        "crashed."
    )
    assert str(found["fails"].failure).startswith("It failed 2 times: RuntimeError: no luck (on ")


def test_timed_calls_have_a_machine_to_themselves(executor: Executor) -> None:
    plain = [Call(function=calls.span, arguments=(0.2,), tag=i) for i in range(6)]
    timed = [Call(function=calls.span, arguments=(0.4,), resources=TIMED, tag=f"timed {i}") for i in range(4)]
    found = values(executor, *plain[:3], *timed, *plain[3:])
    spans = dict(zip([*plain[:3], *timed, *plain[3:]], found, strict=True))
    for call, (begin, end, node) in spans.items():
        beside = [
            other.tag
            for other, (b, e, n) in spans.items()
            if other is not call and n == node and b < end and begin < e and (call in timed or other in timed)
        ]
        assert not beside, f"{call.tag} ran beside {beside}"
    assert len({spans[call][2] for call in timed}) == 2, "both machines are to be used"


@pytest.mark.long
def test_what_no_machine_has_is_refused_in_a_sentence_and_given_up(cluster: Any) -> None:
    with OnRay(patience=1.0) as impatient:
        assert impatient.why_not(Resources()) is None
        assert "asked for 4 CPUs, but no machine of the cluster has that much: of 2 the largest" in str(
            impatient.why_not(Resources(cpus=4))
        )
        impatient.submit(Call(function=calls.process, resources=Resources(cpus=4)))
        impatient.submit(Call(function=calls.process, resources=Resources(cpus=4, exclusive=True)))
        for _ in range(2):
            assert "no machine could run it: asked for 4 CPUs" in str(impatient.take().failure)


@pytest.mark.long
def test_what_is_running_is_cancelled_at_the_end(cluster: Any, tmp_path: Any) -> None:
    with OnRay() as executor:
        executor.submit(Call(function=calls.span, arguments=(600.0,)))
        executor.submit(Call(function=calls.span, arguments=(600.0,), resources=TIMED))
        time.sleep(1.5)
    with OnRay() as executor:
        values(executor, *(Call(function=calls.process, resources=TIMED, tag=i) for i in range(2)))


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
    code = f"from kvtailor.cluster.connect import connect\nconnect({address!r})\nprint('connected')"
    given = {**os.environ, **more, "RAY_gcs_server_request_timeout_seconds": "5"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=given
    )
    assert not done.stdout, done.stdout
    return done.stderr
