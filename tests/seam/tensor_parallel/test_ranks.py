"""Tensor parallelism as users start it: processes under torchrun against the whole model in one process.

Models are in double precision, so that what differs is a decision or a mistake, and not the order of a sum.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvtailor.plan import registry
from tests.seam.tensor_parallel import worker
from tests.seam.tensor_parallel.worker import MORE, configs, plan_of
from tests.support.sampling import few

ROOT = Path(__file__).parents[3]
PRESETS = [plan_of(name) for name in registry.presets()]
# Budgets that heads of several processes share, one kept set for all heads, random draws, bytes, joined codecs.
FEW = [
    "snapkv(window=8) + adakv + kivi(bits=4, group=16, recent=16) @ keep=0.3",
    "snapkv(window=8) + adakv @ bytes=600000",
    "snapkv(window=8) + pooled @ tokens=40",
    "knorm + coverage(per_head=true, window=16) @ keep=0.3",
    "tova + adakv @ tokens=40",
    "snapkv(window=8) + chunks(heads=all) @ tokens=40",
    "h2o + adakv @ tokens=40, slack=4",
    plan_of("kvzip"),
    plan_of("orthogonal_int4"),
    plan_of("streaming"),
]
# What is summed in single precision whatever the model's dtype may be rounded otherwise.
TOLERANCE = 2e-5
TIMEOUT = 540


def launch(ranks: int, *given: str, families: Sequence[str], plans: Sequence[str], folder: Path) -> list[Any]:
    """The records of a run of `worker` in so many processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        worker.__file__,
        "--families",
        *families,
        "--folder",
        str(folder / "models"),
        *given,
        "--plans",
        *plans,
    ]
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ended = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(families) * len(plans)
    return found


def faults(record: Any) -> Iterator[str]:
    """What is wrong with one comparison."""
    if "error" in record:
        yield str(record["error"])
        return
    if not record["tokens"] or not record["kept"]:
        yield f"tokens equal: {record['tokens']}, kept sets equal: {record['kept']}"
    if not record["logits"] <= TOLERANCE:
        yield f"logits differ by {record['logits']}"


def check(records: Sequence[Any]) -> None:
    """Raise with all that is wrong."""
    wrong = [f"{each['family']}, {each['plan']}: {fault}" for each in records for fault in faults(each)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.always
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    plans = few(FEW, 3)
    records = launch(2, families=["llama"], plans=plans, folder=tmp_path)
    check(records)
    # The comparison is of caches that have lost tokens: without the other heads' scores it fails.
    assert sum(each["evicted"] for each in records) >= len(plans) - 2
    for each in records:
        # This process's share of the uncompressed cache, and of the bytes: the ratio is that of the whole.
        assert each["full"] == 1.0
        if each["plan"] != plan_of("orthogonal_int4"):
            assert 0.95 < each["total"] < 1.05


@pytest.mark.skipif(not hasattr(transformers, "GraniteSWAConfig"), reason="this transformers has no Granite-SWA")
def test_two_processes_have_the_sinks_of_their_own_heads(tmp_path: Path) -> None:
    plans = ["snapkv(window=8) + adakv @ keep=0.3", "h2o + adakv @ tokens=40, slack=4", "full"]
    check(launch(2, families=["granite_swa"], plans=plans, folder=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", list(configs()))
def test_every_preset_gives_on_many_processes_what_it_gives_on_one(family: str, ranks: int, tmp_path: Path) -> None:
    records = launch(ranks, families=[family], plans=[*PRESETS, *MORE], folder=tmp_path)
    check(records)
    if family == "phi3":
        # Its projections are gathered before the heads, so that every process has all of them.
        assert {each["full"] for each in records} == {float(ranks)}


def check_files(records: Sequence[Any], sources: Sequence[str]) -> None:
    """Raise unless every cache went on from every source as if it had never been saved."""
    wrong = [f"{each['family']}, {each['plan']}: {each['errors']}" for each in records if each["errors"]]
    for each in records:
        for source in sources:
            told = faults(each[source]) if source in each else ["nothing was loaded"]
            wrong += [f"{each['family']}, {each['plan']}, {source}: {fault}" for fault in told]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_a_saved_cache_goes_on_in_one_process_and_in_two(tmp_path: Path) -> None:
    plans = [FEW[0], FEW[2], "palu", "h2o + adakv @ tokens=40, slack=4"]
    records = launch(2, "--saved", str(tmp_path / "saved"), families=["gemma3"], plans=plans, folder=tmp_path)
    check_files(records, ["same", "from_one", "in_one"])


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
def test_every_saved_cache_goes_on_in_another_number_of_processes(family: str, tmp_path: Path) -> None:
    plans = [*PRESETS, *MORE]
    two, four = tmp_path / "two", tmp_path / "four"
    check_files(
        launch(2, "--saved", str(two), families=[family], plans=plans, folder=tmp_path), ["same", "from_one", "in_one"]
    )
    given = ("--saved", str(four), "--saved-there", str(two))
    check_files(
        launch(4, *given, families=[family], plans=plans, folder=tmp_path),
        ["same", "from_one", "in_one", "from_others"],
    )
    given = ("--saved", str(tmp_path / "again"), "--saved-there", str(four))
    few = [*FEW, "palu", "rocketkv", "snapkv(window=8) + adakv + rocket(tokens=40, expect=8) @ keep=0.4"]
    check_files(launch(2, *given, families=[family], plans=few, folder=tmp_path), ["from_others"])
