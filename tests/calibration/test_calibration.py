"""Calibration files: what is written is read back, and what is not one of ours is refused in a sentence."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.support.calibrated import MADE, filters_for, tiny, write_file

import kvtailor
from kvtailor import calibration_file
from kvtailor.calibration_file import CalibratedMethod, read, shipped, write
from kvtailor.errors import CalibrationError, PlanError
from kvtailor.hf.model.fingerprint import turns_of
from kvtailor.plan import Plan
from kvtailor.score.by_keys.qfilters import QFilters

MODEL = tiny().model


def plan_of(path: str) -> Plan:
    return Plan.parse(f'qfilters(file="{path}") @ keep=0.5')


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tensors = filters_for(MODEL)
    path = write_file(tmp_path / "f.safetensors", "qfilters", tensors, MODEL, on="some text", facts='{"a": [1, 2]}')
    found = read(path, "qfilters", "asked")
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    assert torch.equal(found.of_layer(2)["filters"], tensors["filters"][2])
    assert (found.kind, found.model, found.texts, found.facts) == ("qfilters", "m", ("a text",), {"a": [1, 2]})
    assert (found.shapes.layers, found.shapes.kv_heads, found.shapes.head_size) == (3, 2, 16)
    assert [each.name for each in tmp_path.iterdir()] == ["f.safetensors"]


def test_what_is_no_calibration_of_the_kind_is_refused(tmp_path: Path) -> None:
    tensors = filters_for(MODEL)
    good = Path(write_file(tmp_path / "good.safetensors", "qfilters", tensors, MODEL))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-7])
    noise = tmp_path / "noise.safetensors"
    noise.write_bytes(b"\xff" * 40)
    foreign = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file(tensors, foreign)
    other = write_file(tmp_path / "other.safetensors", "duo", tensors, MODEL)
    fewer = write_file(tmp_path / "fewer.safetensors", "qfilters", {"filters": tensors["filters"][:2]}, MODEL)
    head = write_file(tmp_path / "head.safetensors", "qfilters", tensors, MODEL, shapes="{}")
    broken = {"filters": tensors["filters"].clone().index_fill_(0, torch.tensor([1]), float("nan"))}
    nan = write_file(tmp_path / "nan.safetensors", "qfilters", broken, MODEL)
    for path, reason in (
        (cut, "damaged or was changed"),
        (noise, "damaged or was changed"),
        (foreign, r"not a calibration file of this kvtailor \(format None"),
        (other, "of kind 'duo'"),
        (fewer, "its head has 3 layers, and filters has other ones"),
        (head, "whose head cannot be read"),
        (nan, "has NaN or infinity in filters"),
    ):
        with pytest.raises(PlanError, match=f"qfilters: file is .*{Path(path).name}.*{reason}") as refused:
            plan_of(str(path))
        assert len(refused.value.faults) == 1 and "run `kvtailor calibrate qfilters" in refused.value.faults[0]
    with pytest.raises(PlanError, match="qfilters: file is .*none.safetensors', and there is no file"):
        plan_of(str(tmp_path / "none.safetensors"))
    plan_of(str(good))


def test_a_file_of_keys_that_were_turned_otherwise_is_refused(tmp_path: Path) -> None:
    """The weights are the same, and the keys that were measured are not this model's."""
    made = json.dumps({**MADE, "rotary": turns_of(MODEL)})
    plan = plan_of(write_file(tmp_path / "f.safetensors", "qfilters", filters_for(MODEL), MODEL, made=made))
    kvtailor.cache_for(MODEL, plan)
    other = copy.deepcopy(MODEL)
    other.model.rotary_emb.inv_freq *= 1.1
    with pytest.raises(CalibrationError, match=r"f.safetensors was made where this llama turned its keys by other"):
        kvtailor.cache_for(other, plan)


def test_scales_that_are_none_are_refused(tmp_path: Path) -> None:
    scales = {name: torch.ones(3, 2) for name in ("key_scale", "value_scale")}
    for wrong in (0.0, -1.0):
        scales["value_scale"][1, 0] = wrong
        path = write_file(tmp_path / "s.safetensors", "static_fp8", scales, MODEL)
        with pytest.raises(PlanError, match="s.safetensors has scales that are not above 0 in value_scale"):
            kvtailor.cache_for(MODEL, Plan.parse(f"static_fp8(file='{path}')"))


def test_a_plans_hash_follows_the_content_of_its_file(tmp_path: Path) -> None:
    one = write_file(tmp_path / "one.safetensors", "qfilters", filters_for(MODEL), MODEL)
    first, unhashed = plan_of(one), plan_of(one)
    assert plan_of(one).hash == first.hash
    write_file(tmp_path / "one.safetensors", "qfilters", filters_for(MODEL, state=1), MODEL)
    assert plan_of(one).hash != first.hash
    assert unhashed.hash == first.hash, "what a plan read when it was made is what it is"
    copy = write_file(tmp_path / "two.safetensors", "qfilters", filters_for(MODEL, state=1), MODEL)
    assert plan_of(copy).hash != plan_of(one).hash, "arguments count as they are written"
    assert Plan.parse(str(first)).score.file == one and Plan.from_toml(first.to_toml()).score.file == one


def test_without_a_file_the_hash_follows_what_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_file, "_HOME", tmp_path)
    seen = []
    for state in (0, 1):
        (tmp_path / "m").mkdir(exist_ok=True)
        write_file(tmp_path / "m" / "qfilters.safetensors", "qfilters", filters_for(MODEL, state=state), MODEL)
        shipped.cache_clear()
        seen.append(Plan.parse("qfilters @ keep=0.5").hash)
    shipped.cache_clear()
    assert seen[0] != seen[1]


def test_a_file_without_a_head_or_a_folder_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs kind, model"):
        write(tmp_path / "f.safetensors", filters_for(MODEL), {"shapes": "{}"})
    with pytest.raises(CalibrationError, match="which failed"):
        write_file(tmp_path / "nowhere" / "f.safetensors", "qfilters", filters_for(MODEL), MODEL)
    assert list(tmp_path.iterdir()) == []


def test_every_calibrated_method_has_a_calibrator_and_examples_of_its_shapes() -> None:
    from kvtailor.calibration.contract import kinds
    from kvtailor.plan import registry

    found = [registry.load(stage, name) for stage in registry.stages() for name in registry.methods(stage)]
    calibrated = [kind for kind in found if issubclass(kind, CalibratedMethod)]
    assert QFilters in calibrated
    for kind in calibrated:
        assert kind.calibrates in kinds()
        assert "file" in {field.name for field in dataclasses.fields(kind)}
        generator = torch.Generator().manual_seed(0)
        tensors = kind.example_calibration(layers=5, heads=3, group=2, size=7, generator=generator)
        assert all(tensor.shape[0] == 5 for tensor in tensors.values())
        assert all(tensors[name].shape[1] == 3 for name in kind.per_head)
