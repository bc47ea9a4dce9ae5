"""What needs a cluster of another kind: accelerators that change hands, little memory, machines that are marked."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from tests.cluster import calls  # noqa: E402
from tests.support.ray_cluster import STORE, cluster_of  # noqa: E402

from kvtailor.cluster import EXCLUSIVE, Executor, Resources, connect  # noqa: E402

pytestmark = pytest.mark.long


def values(executor: Executor, function: Any, seconds: list[float], resources: Resources) -> list[Any]:
    for each in seconds:
        executor.submit(function, each, resources=resources)
    found = [executor.take() for _ in seconds]
    assert [each.failure for each in found if each.failure] == []
    return [each.value for each in found]


def test_a_process_that_is_given_other_accelerators_ends_instead_of_using_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    settle = Executor._settled
    monkeypatch.setattr(
        Executor, "_settled", lambda self, call, future: (ended.append(call), settle(self, call, future))[1]
    )
    one, cells = Resources(gpus=1), 0
    with cluster_of(1, num_cpus=2, num_gpus=2) as (cluster, _), connect(cluster.address) as executor:
        seen: set[tuple[int, str]] = set()
        for _ in range(20):
            found = values(executor, calls.devices, [1.0, 1.5], one)
            # Both processes wait, and the next call may be given the other one's accelerator.
            found += values(executor, calls.devices, [0.0], one)
            cells += 3
            seen |= {(pid, ids[0]) for ids, pid in found}
            if len(ended) > cells:
                break
        # Who looks at accelerators is asked where there are some; Ray hides them from all others.
        assert executor.on_each_machine(calls.devices, 0.0)[0].value[0] == []
        [(ids, _)] = [outcome.value for outcome in executor.on_each_machine(calls.devices, 0.0, gpus=0.01)]
        assert ids in (["0"], ["1"])
        bare = cluster.add_node(num_cpus=1, object_store_memory=STORE)
        cluster.wait_for_nodes()
        assert len(executor.on_each_machine(calls.devices, 0.0)) == 2 and bare.node_id
        assert len(executor.on_each_machine(calls.devices, 0.0, gpus=0.01)) == 1
    assert len(ended) > cells, "no process was given another accelerator: this test shows nothing"
    assert len({pid for pid, _ in seen}) == len(seen), f"a process used two accelerators: {seen}"


def test_a_worker_that_takes_too_much_memory_is_named_as_such() -> None:
    little = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "100"}
    with cluster_of(1, little) as (cluster, _), connect(cluster.address) as executor:
        executor.submit(calls.fills, 2**30, 60.0)
        outcome = executor.take()
    assert "the machine ran low on memory and Ray ended the worker" in str(outcome.failure)


def test_where_machines_are_marked_only_those_time() -> None:
    timed = Resources(exclusive=True)
    with cluster_of(1) as (cluster, _):
        marked = cluster.add_node(num_cpus=1, object_store_memory=STORE, resources={EXCLUSIVE: 1})
        cluster.wait_for_nodes()
        with connect(cluster.address) as executor:
            found = values(executor, calls.span, [0.3] * 4, timed)
            assert {node for _, _, node in found} == {marked.node_id}
            spans = sorted((begin, end) for begin, end, _ in found)
            assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def test_a_timed_call_has_all_processors_of_its_machine() -> None:
    def overlap(one: Any, other: Any) -> bool:
        return one is not other and one[0] < other[1] and other[0] < one[1]

    with cluster_of(1, num_cpus=3) as (cluster, _), connect(cluster.address) as executor:
        for _ in range(20):
            # Until three processes have begun.
            warm = values(executor, calls.span, [1.0] * 3, Resources())
            if overlap(warm[0], warm[1]) and overlap(warm[1], warm[2]):
                break
        for number in range(9):
            executor.submit(calls.span, 0.5, resources=Resources(exclusive=number in (3, 6)), tag=number)
        spans = {outcome.tag: outcome.value for outcome in (executor.take() for _ in range(9))}
    plain = [spans[number] for number in spans if number not in (3, 6)]
    assert any(overlap(one, other) for one in plain for other in plain), "nothing ran beside anything"
    for number in (3, 6):
        assert not [each for each in spans.values() if overlap(spans[number], each)]
