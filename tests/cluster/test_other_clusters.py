"""What needs a cluster of another kind: accelerators that change hands, little memory, machines that are marked."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from tests.cluster import calls  # noqa: E402
from tests.support.ray_cluster import STORE, cluster_of  # noqa: E402

from kvtailor.cluster.connect import connect  # noqa: E402
from kvtailor.cluster.contract import Call, Executor, Resources  # noqa: E402
from kvtailor.cluster.on_ray import EXCLUSIVE, OnRay  # noqa: E402

pytestmark = pytest.mark.long


def values(executor: Executor, asked: list[Call]) -> list[Any]:
    for call in asked:
        executor.submit(call)
    found = [executor.take() for _ in asked]
    assert [each.failure for each in found if each.failure] == []
    return [each.value for each in found]


def test_a_process_that_is_given_other_accelerators_ends_instead_of_using_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    begin = OnRay._begin
    monkeypatch.setattr(OnRay, "_begin", lambda self, number: (begun.append(number), begin(self, number))[1])
    one, cells = Resources(gpus=1), 0
    with cluster_of(1, num_cpus=2, num_gpus=2) as (cluster, _), connect(cluster.address) as executor:
        seen: set[tuple[int, str]] = set()
        for _ in range(20):
            found = values(
                executor,
                [
                    Call(function=calls.devices, arguments=(seconds,), resources=one, tag=seconds)
                    for seconds in (1.0, 1.5)
                ],
            )
            cells += 2
            # Both processes wait, and the next call may be given the other one's accelerator.
            found += values(executor, [Call(function=calls.devices, arguments=(0.0,), resources=one)] * 1)
            cells += 1
            seen |= {(pid, ids[0]) for ids, pid in found}
            if len(begun) > cells:
                break
        # Who looks at accelerators is asked where there are some; Ray hides them from all others.
        assert executor.on_each_machine(calls.devices, 0.0)[0].value[0] == []
        [(ids, _)] = [outcome.value for outcome in executor.on_each_machine(calls.devices, 0.0, gpus=0.01)]
        assert ids in (["0"], ["1"])
        bare = cluster.add_node(num_cpus=1, object_store_memory=STORE)
        cluster.wait_for_nodes()
        assert len(executor.on_each_machine(calls.devices, 0.0)) == 2 and bare.node_id
        assert len(executor.on_each_machine(calls.devices, 0.0, gpus=0.01)) == 1
    assert len(begun) > cells, "no process was given another accelerator: this test shows nothing"
    assert len({pid for pid, _ in seen}) == len(seen), f"a process used two accelerators: {seen}"


def test_a_worker_that_takes_too_much_memory_is_named_as_such() -> None:
    little = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "100"}
    with cluster_of(1, little) as (cluster, _), connect(cluster.address) as executor:
        executor.submit(Call(function=calls.fills, arguments=(2**30, 60.0)))
        outcome = executor.take()
    assert "the machine ran low on memory and Ray ended the worker" in str(outcome.failure)
    assert outcome.attempts == 2


def test_where_machines_are_marked_only_those_time() -> None:
    timed = Resources(exclusive=True)
    with cluster_of(1) as (cluster, _):
        marked = cluster.add_node(num_cpus=1, object_store_memory=STORE, resources={EXCLUSIVE: 1})
        cluster.wait_for_nodes()
        with connect(cluster.address) as executor:
            asked = [Call(function=calls.span, arguments=(0.3,), resources=timed, tag=i) for i in range(4)]
            found = values(executor, asked)
            assert {node for _, _, node in found} == {marked.node_id}
            spans = sorted((begin, end) for begin, end, _ in found)
            assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
