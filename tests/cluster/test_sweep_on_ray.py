"""A suite on a head and two one-CPU nodes gives the records of a run alone, undisturbed and after three kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")

from tests.support.ray_cluster import STORE, cluster_of  # noqa: E402

pytestmark = pytest.mark.long

SUITE = Path(__file__).with_name("sweep.toml")
TIMED = ("speed",)
# The checksum is over all of them, and which cell of a run is measured both ways goes by who measures it.
MAY_DIFFER = (
    *("run", "started", "machine", "wall_seconds", "timings", "floor_seconds"),
    *("checksum", "prefill_compared"),
)
# A checkout with changed files reuses no records: here no commit is known.
VARIABLES = {"GIT_DIR": "/nowhere"}
PATIENCE = 400


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Any, list[Any]]]:
    with cluster_of(2, VARIABLES) as found:
        yield found


@pytest.fixture(scope="module")
def alone(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone")
    finish(bench(out))
    return compared(out)


def bench(out: Path, address: str | None = None) -> subprocess.Popen[str]:
    ray = [] if address is None else ["--ray", address]
    words = [sys.executable, "-m", "kvtailor", "bench", "--suite", str(SUITE), "--model", "demo", "--out", str(out)]
    return subprocess.Popen(
        [*words, *ray], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )


def finish(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, told[-4000:]
    return told


def records(out: Path) -> list[dict[str, Any]]:
    """Every record whose line is whole."""
    lines = [line for file in sorted(out.glob("*.jsonl")) for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def compared(out: Path) -> dict[str, Any]:
    """The records by what they measured, each once, without what may differ."""
    found: dict[str, Any] = {}
    for record in records(out):
        key = json.dumps([record["asked"], record["point"], record["plan_hash"]])
        assert key not in found, f"twice: {key}"
        dropped = (*MAY_DIFFER, *(("values", "metrics", "samples", "notes") if record["task"] in TIMED else ()))
        found[key] = {name: value for name, value in record.items() if name not in dropped}
        assert record["error"] is None
    return found


def hosts(out: Path) -> set[str]:
    return {record["machine"]["host"] for record in records(out)}


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """What a function gives, once that is something."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        assert process.poll() is None, f"it ended before it could be disturbed: {process.communicate()[0][-3000:]}"
        time.sleep(0.02)
    raise AssertionError("it never came")


def workers(node: Any) -> list[Any]:
    """The processes of a node that are in the midst of a call."""
    [raylet] = node.all_processes["raylet"]
    below = psutil.Process(raylet.process.pid).children(recursive=True)
    return [each for each in below if each.is_running() and each.name().startswith("ray::answer")]


def test_a_suite_on_three_nodes_gives_the_records_of_a_run_alone(
    cluster: Any, alone: dict[str, Any], tmp_path: Path
) -> None:
    told = finish(bench(tmp_path, cluster[0].address))
    assert compared(tmp_path) == alone
    assert len(hosts(tmp_path)) == 2
    assert "records by machine: " in told
    timed = [record for record in records(tmp_path) if record["task"] in TIMED]
    assert len({record["machine"]["host"] for record in timed}) == 1, "what is compared is timed on one machine"
    assert all(record["machine"]["read_bandwidth"] for record in timed)
    # Nothing is measured again, and a run alone on the same kind of machine may take these records, too.
    finish(bench(tmp_path, cluster[0].address))
    finish(bench(tmp_path))
    assert compared(tmp_path) == alone


def test_a_killed_worker(cluster: Any, alone: dict[str, Any], tmp_path: Path) -> None:
    process = bench(tmp_path, cluster[0].address)
    wait_for(lambda: records(tmp_path), process)
    for node in cluster[1]:
        [worker, *_] = wait_for(lambda node=node: workers(node), process)
        worker.send_signal(signal.SIGKILL)
    finish(process)
    assert compared(tmp_path) == alone


def test_a_killed_driver(cluster: Any, alone: dict[str, Any], tmp_path: Path) -> None:
    process = bench(tmp_path, cluster[0].address)
    wait_for(lambda: len(records(tmp_path)) >= 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = records(tmp_path)
    assert len(before) < len(alone)
    told = finish(bench(tmp_path, cluster[0].address))
    assert f"{len(before)} of {len(alone)} records were there already" in told
    assert compared(tmp_path) == alone


def test_an_interrupted_driver_leaves_nothing_behind(cluster: Any, tmp_path: Path) -> None:
    process = bench(tmp_path, cluster[0].address)
    wait_for(lambda: workers(cluster[1][0]), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    end = time.monotonic() + 60
    while any(workers(node) for node in cluster[1]):
        assert time.monotonic() < end, "a cell goes on after its run was ended"
        time.sleep(0.1)


def test_a_removed_node(cluster: Any, alone: dict[str, Any], tmp_path: Path) -> None:
    """Last, since it changes the cluster."""
    process = bench(tmp_path, cluster[0].address)
    wait_for(lambda: records(tmp_path), process)
    wait_for(lambda: workers(cluster[1][0]), process)
    cluster[0].remove_node(cluster[1].pop(0), allow_graceful=False)
    wait_for(lambda: len(records(tmp_path)) >= 8, process)
    cluster[1].append(cluster[0].add_node(num_cpus=1, object_store_memory=STORE))
    finish(process)
    assert compared(tmp_path) == alone
