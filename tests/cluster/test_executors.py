"""What every executor promises, of the one in this process; and what a cluster is asked for."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.support.in_process import InProcess

from kvtailor.cluster.connect import connect
from kvtailor.cluster.contract import Call, Resources
from kvtailor.errors import KvtailorError


def test_calls_end_with_a_value_or_with_a_reason() -> None:
    begun: list[int] = []

    def fail(number: int) -> None:
        begun.append(number)
        raise ValueError(f"number {len(begun)}")

    with InProcess() as executor:
        assert executor.has_room and not executor.pending
        executor.submit(Call(function=divmod, arguments=(7, 3), tag="first"))
        executor.submit(Call(function=fail, arguments=(1,), tag="second"))
        assert executor.pending == 2 and not executor.has_room
        good, bad = executor.take(), executor.take()
    assert (good.call.tag, good.value, good.failure, good.attempts) == ("first", (2, 1), None, 1)
    assert (bad.call.tag, bad.value, bad.attempts, begun) == ("second", None, 2, [1, 1])
    assert bad.failure == "It failed 2 times: ValueError: number 1; then: ValueError: number 2."
    with pytest.raises(KvtailorError, match="no call is pending"):
        executor.take()


def test_a_value_is_shared() -> None:
    executor = InProcess()
    one, other = executor.share({"a": 1}), executor.share({"a": 1})
    assert one.get() is one.get() and one.name != other.name


def test_a_closed_executor_runs_nothing_more() -> None:
    with InProcess() as executor:
        executor.submit(Call(function=pytest.fail))
    assert not executor.pending


def test_resources_in_words() -> None:
    assert str(Resources()) == "1 CPU"
    assert str(Resources(cpus=0.5, gpus=2, memory=10, exclusive=True)) == (
        "0.5 CPUs, 2 GPUs, 10 bytes of memory, with nothing else beside it"
    )
    assert [Resources(cpus=cpus).threads for cpus in (0.5, 1, 4)] == [1, 1, 4]


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KvtailorError, match=r"asked for Ray, .*: run `pip install 'kvtailor\[ray\]'`"):
        connect()


def test_ray_tells_nobody_of_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KvtailorError):
        connect()
    import os

    found: Any = os.environ.pop("RAY_USAGE_STATS_ENABLED")
    assert found == "0"
