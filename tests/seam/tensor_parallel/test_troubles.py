"""Trouble in one process reaches all of them, and what each would decide for itself is decided once, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheFileError, CacheMisuse, PlanError, UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.tensor_parallel import check_plan, share_of
from kvtailor.hf.saved_ranks import Shard, StandIn
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.score.by_keys.knorm import KNorm
from tests.seam.tensor_parallel import troubles
from tests.seam.tensor_parallel.test_ranks import ROOT
from tests.support.seam.zoo import build, prompts


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes met."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        troubles.__file__,
        "--folder",
        str(tmp_path_factory.mktemp("troubles")),
    ]
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ended = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 2
    return found


@pytest.mark.together
def test_all_processes_refuse_what_one_cannot_score(met: list[dict[str, Any]]) -> None:
    assert all("CacheMisuse" in each["no score"] and "no finite score" in each["no score"] for each in met)


@pytest.mark.together
def test_a_saving_that_fails_in_one_process_leaves_what_was_there(met: list[dict[str, Any]]) -> None:
    assert met[0]["no room"].startswith("CacheFileError: process 1 of 2: no room | same files: True | True")
    assert met[1]["no room"].startswith("CacheFileError: no room | same files: True | True")


@pytest.mark.together
def test_a_folder_of_something_else_is_left_alone(met: list[dict[str, Any]]) -> None:
    assert all("thesis.tex" in each["strange folder"] for each in met)
    assert all("no saved cache" in each["no cache"] for each in met)


@pytest.mark.together
def test_drawn_tokens_are_the_same_everywhere(met: list[dict[str, Any]]) -> None:
    assert met[0]["sampled"] == met[1]["sampled"] and met[0]["sampled"].startswith("[")


@pytest.mark.together
def test_drafts_by_measured_times_are_refused(met: list[dict[str, Any]]) -> None:
    assert all("follow measured times" in each["adaptive"] for each in met)
    assert met[0]["drafted"] == met[1]["drafted"] == met[0]["plain"] and met[0]["plain"].startswith("[")
    assert all("graphs=True records the steps of one process" in each["graphs"] for each in met)


@pytest.mark.together
def test_files_that_do_not_belong_together_are_refused(met: list[dict[str, Any]]) -> None:
    """Logits were off by as much as they are large, and nothing said so."""
    for each in met:
        apart, replaced, reversed_ = each["foreign"]
        assert "CacheFileError" in apart and "name a folder that all of their machines share" in apart
        assert all("CacheFileError" in told and "does not belong where it is" in told for told in (replaced, reversed_))


@pytest.mark.together
def test_one_plan_is_needed(met: list[dict[str, Any]]) -> None:
    for each in met:
        told = each["other plans"]
        assert "process 0 has 'position @ tokens=20" in told and "process 1 'position @ tokens=21" in told


@pytest.mark.together
def test_bytes_that_another_process_hides_are_found(met: list[dict[str, Any]]) -> None:
    assert [each["hidden"] for each in met] == ["1", "1"]


def test_a_part_of_a_saved_cache_names_its_folder(tmp_path: Path) -> None:
    shard = Shard(path=tmp_path / "rank-0-of-2-0123456789abcdef.safetensors", rank=0, ranks=1)
    with pytest.raises(CacheFileError, match="is one of several files of a saved cache .* name its folder"):
        shard.check({"saving": "0123456789abcdef", "rank": 0, "ranks": 2})


def test_a_file_is_not_written_over_a_folder(tmp_path: Path) -> None:
    cache = kvtailor.prefill(build("llama"), *prompts((20,)), plan="streaming @ tokens=16")
    with pytest.raises(CacheFileError, match="which is a folder: one process writes a file"):
        cache.save(tmp_path)


@pytest.mark.together
def test_a_calibration_of_some_heads_is_refused(met: list[dict[str, Any]]) -> None:
    assert all("measured on a model in one process, and 2 share this one" in each["calibrated"] for each in met)


@pytest.mark.together
def test_the_whole_ledger_is_the_sum(met: list[dict[str, Any]]) -> None:
    for each in met:
        total, full, seen, by_layer, by_stage = each["whole"]
        assert total == sum(other["own"][0] for other in met) == by_layer == by_stage
        assert full == sum(other["own"][1] for other in met) and seen > 0


def meshed(model: Any, plan: dict[str, str], **sizes: int) -> Any:
    """A model that says that it is shared among so many processes."""
    mesh = SimpleNamespace(mesh_dim_names=tuple(sizes), shape=tuple(sizes.values()))
    model._device_mesh, model._tp_plan = mesh, plan
    return model


_COLUMNS = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}


def test_heads_that_do_not_divide_are_refused() -> None:
    model = meshed(build("llama"), _COLUMNS, pp=1, fsdp=1, tp=4)
    with pytest.raises(UnsupportedModel, match="2 kv heads and 4 query heads, which 4 processes cannot share evenly"):
        kvtailor.cache_for(model, "streaming @ tokens=16")


def test_layers_on_several_processes_are_refused() -> None:
    model = meshed(build("llama"), _COLUMNS, pp=2, fsdp=1, tp=1)
    with pytest.raises(UnsupportedModel, match="pipeline parallelism"):
        kvtailor.cache_for(model, "streaming @ tokens=16")


def test_an_unknown_way_to_share_is_refused() -> None:
    model = meshed(build("llama"), {**_COLUMNS, "model.layers.*.self_attn.k_proj": "sequence_parallel"}, tp=2)
    with pytest.raises(UnsupportedModel, match="cannot tell which kv heads"):
        share_of(model, Geometry.of(model.config))


def test_one_process_has_all_heads() -> None:
    model = meshed(build("llama"), _COLUMNS, pp=1, fsdp=4, tp=1)
    assert share_of(model, Geometry.of(model.config)).ranks == 1


def test_a_method_that_does_not_say_that_it_splits_is_refused() -> None:
    class Theirs(KNorm):
        """Of another package."""

    geometry = Geometry.of(build("llama").config)
    with pytest.raises(PlanError, match="does not declare that it works where the kv heads of a layer lie on 2"):
        check_plan(Plan(score=Theirs(), tokens=16), geometry, StandIn(0, 2))
    check_plan(Plan(score=Theirs(), tokens=16), geometry, kvtailor.types.ALL_HEADS)


def test_groups_of_heads_that_processes_cannot_share_are_refused() -> None:
    geometry = Geometry.of(build("llama").config)
    wide = replace(geometry, shapes=tuple(replace(shape, kv_heads=12, q_heads=12) for shape in geometry.shapes))
    with pytest.raises(PlanError, match="projects 4 kv heads together, and each of the 4 processes holds 3"):
        check_plan(Plan.parse("lowrank(heads=4, basis=random)"), wide, StandIn(0, 4))
    check_plan(Plan.parse("lowrank(heads=4, basis=random)"), wide, StandIn(0, 3))


def test_keys_of_other_heads_than_this_process_has_are_refused() -> None:
    """A model that is sharded otherwise than its plan says: nothing is compressed on wrong heads."""
    model = build("llama")
    cache = kvtailor.cache_for(model, "streaming @ tokens=16")
    other = KvCache(cache.plan, cache.geometry, cache.guard.config, share=StandIn(0, 2))
    with pytest.raises(CacheMisuse, match="layers of 1 kv heads of 2 on 2 processes, and layer 0 has keys of 2"):
        model(prompts((9,))[0], **hand_cache(other))


def test_a_copy_of_a_cache_keeps_its_processes() -> None:
    import copy

    share = StandIn(1, 2)
    assert copy.deepcopy(share) is share
    with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError)):
        share.sum(torch.ones(1))
