"""The files of examples/ray_cluster: Ray's own schema takes the one, and the commands of the other run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.support.ray_cluster import environment

pytest.importorskip("ray")
yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "ray_cluster"


def test_the_cluster_file_is_one_that_ray_takes() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((FOLDER / "cluster.yaml").read_text(encoding="utf-8"))
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["provider"]["worker_ips"] == ["FIRST_HOST", "SECOND_HOST"]
    starts = [*prepared["head_start_ray_commands"], *prepared["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in line for line in starts if "ray start" in line)


def commands() -> dict[str, list[str]]:
    """The lines of the README's blocks that start a head, start another machine, and run the bench."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    marks = {"head": "ray start --head", "node": "ray start --address", "bench": "kvtailor bench"}
    return {name: [line for line in lines if line.startswith(mark)] for name, mark in marks.items()}


@pytest.mark.long
def test_the_commands_run(tmp_path: Path) -> None:
    """On this machine alone, with another port and folder. `ray stop` would end clusters of others: it is not run."""
    found = commands()
    assert {name: len(lines) for name, lines in found.items()} == {"head": 1, "node": 1, "bench": 1}
    port = 6400 + os.getpid() % 500
    # Ray's sockets have names of at most 107 characters, for which a folder of pytest is too long.
    folder = Path(tempfile.mkdtemp(prefix="kvtailor-ray-", dir="/tmp"))
    few = "--block --object-store-memory 80000000"
    started = []
    with environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        try:
            head = f"{_local(found['head'][0], port)} {few} --temp-dir {folder} --include-dashboard false"
            started.append(_begun(f"{head} --disable-usage-stats"))
            _wait_for(port)
            started.append(_begun(f"{_local(found['node'][0], port)} {few} --num-cpus 1"))
            _wait_for_node(port)
            line = _local(found["bench"][0], port).replace("kvtailor ", f"{sys.executable} -m kvtailor ", 1)
            line = line.replace("--out results", f"--out {tmp_path / 'results'}")
            done = subprocess.run(
                f"{line} --context 64 --continuation 16 --windows 4",
                shell=True,
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert len(next((tmp_path / "results").glob("*.jsonl")).read_text().splitlines()) == 2
        finally:
            for process in reversed(started):
                _end(process)
            shutil.rmtree(folder, ignore_errors=True)


def _begun(line: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        line, shell=True, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _local(line: str, port: int) -> str:
    return line.replace("HEAD_HOST", "127.0.0.1").replace("6379", str(port))


def _wait_for(port: int) -> None:
    for _ in range(1200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the head did not start")


def _wait_for_node(port: int) -> None:
    code = (
        "import ray, time\n"
        f"ray.init('127.0.0.1:{port}', logging_level='ERROR')\n"
        "while not ray.cluster_resources().get('kvtailor_exclusive'):\n    time.sleep(0.1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, capture_output=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
