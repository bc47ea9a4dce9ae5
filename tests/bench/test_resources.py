"""What a cell takes on a cluster: a suite's table and the option, all faults at once, with the nearest names."""

from __future__ import annotations

import pytest

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.resources import CellResources, read_resources, resources_of_line
from kvtailor.cluster import Resources
from kvtailor.errors import ArgumentError


def test_a_tasks_own_go_before_those_of_every_cell() -> None:
    faults: list[str] = []
    found = read_resources({"cpus": 2, "memory": "1GiB", "speed": {"cpus": 8, "gpus": 0.5}}, faults)
    assert not faults
    assert found.of("perplexity", exclusive=False) == Resources(cpus=2.0, memory=2**30)
    assert found.of("speed", exclusive=True) == Resources(cpus=8.0, gpus=0.5, memory=2**30, exclusive=True)
    assert CellResources().of("speed", exclusive=False) == Resources()
    assert CellResources().of("speed", exclusive=False, device="cuda") == Resources(gpus=1.0)
    assert found.of("speed", exclusive=False, device="cuda").gpus == 0.5


def test_memory_is_a_task_and_a_resource() -> None:
    faults: list[str] = []
    found = read_resources({"default": {"memory": 10}, "memory": {"cpus": 2}}, faults)
    assert not faults and found == resources_of_line("default.memory=10, memory.cpus=2")
    assert found.of("memory", exclusive=True) == Resources(cpus=2.0, memory=10, exclusive=True)
    with pytest.raises(ArgumentError, match=r"or write default\.NAME"):
        resources_of_line("memory.cpus=2, memory=10")


def test_the_line_says_the_same_and_goes_before_a_suite() -> None:
    line = resources_of_line("cpus=2, memory=1GiB, speed.cpus=8, speed.gpus=0.5")
    assert line == read_resources({"cpus": 2, "memory": "1GiB", "speed": {"cpus": 8, "gpus": 0.5}}, [])
    suite = read_resources({"cpus": 1, "gpus": 1, "speed": {"cpus": 4, "memory": 10}}, [])
    both = resources_of_line("cpus=2, speed.cpus=8").over(suite)
    assert both.of("perplexity", exclusive=False) == Resources(cpus=2.0, gpus=1.0)
    assert both.of("speed", exclusive=False) == Resources(cpus=8.0, gpus=1.0, memory=10)
    assert resources_of_line("") == CellResources()


def test_all_faults_at_once_with_the_nearest_names() -> None:
    faults: list[str] = []
    read_resources(
        {"cpu": 2, "gpus": -1, "memory": "much", "sped": {"cpus": 1}, "needle": {"cpus": 1.5, "gpu": 1}, "speed": 3},
        faults,
    )
    told = "\n".join(faults)
    assert len(faults) == 7
    assert "there is nothing named resources.cpu; did you mean 'cpus'" in told
    assert "resources.gpus is -1: give a whole number of accelerators" in told
    assert "resources.memory is 'much': 'much' is not a whole number of bytes" in told
    assert "[resources.sped] is of no task: there is no task named 'sped'; did you mean 'speed'" in told
    assert "resources.needle.cpus is 1.5: give a whole number of processors" in told
    assert "there is nothing named resources.needle.gpu; did you mean 'gpus'" in told
    assert "resources.speed is 3: write a table" in told


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("cpus", "'cpus' has no value: write NAME=VALUE"),
        ("cpus=", "'cpus=' has no value"),
        ("cpus=0", "resources.cpus is 0: give a whole number of processors"),
        ("cpus=true", "resources.cpus is 'true': give a number"),
        ("cpus=nan", "give a number"),
        ("cpus=1, cpus=2", "cpus is given twice"),
        ("speed.cpus=1, speed.cpus=2", "speed.cpus is given twice"),
        ("speed=1, speed.cpus=2", "speed.cpus is given twice"),
        ("memory=0", "resources.memory is 0: give bytes, such as '8GiB'"),
    ],
)
def test_a_line_with_faults(line: str, fault: str) -> None:
    with pytest.raises(ArgumentError) as error:
        resources_of_line(line)
    assert fault in str(error.value) and str(error.value).startswith("--resources ")


def test_what_times_or_weighs_is_exclusive() -> None:
    exclusive = {name for name, kind in KINDS.items() if kind.of_cost or kind.timings}
    assert exclusive == {"speed", "memory", "capacity", "speculation"}
