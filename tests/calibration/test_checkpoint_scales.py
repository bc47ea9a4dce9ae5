"""Scales of an 8-bit cache: measured, written into a copy of a checkpoint, read back to the bit, and read by others."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from tests.support.calibrated import tiny
from transformers import DynamicCache

import kvtailor
from kvtailor.calibration.checkpoint_scales import export_scales, read_scales, write_scales
from kvtailor.calibration.released import import_released
from kvtailor.calibration.static_fp8 import scales_of
from kvtailor.calibration_file import Calibration
from kvtailor.cli import main
from kvtailor.errors import ArgumentError, CalibrationError, FileError
from kvtailor.hf.versions import hand_cache

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a folder of transformers."""
    folder = tmp_path_factory.mktemp("checkpoints") / "demo"
    model, tokenizer = kvtailor.load_model("demo")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(checkpoint: Path) -> Calibration:
    out = checkpoint.parent / "scales.safetensors"
    return kvtailor.calibrate("demo", "static_fp8", {"text": TEXT}, out=out, tokens=128, context=64)


def plan_of(checkpoint: Path, per: str) -> str:
    return f"static_fp8(file='{checkpoint.parent / 'scales.safetensors'}', per={per})"


def test_a_scale_is_the_least_number_of_bfloat16_that_clips_nothing() -> None:
    most = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float32).pow(6) * 100
    found = scales_of(torch.cat([most, torch.tensor([0.0, 448.0])]))
    assert torch.equal(found, found.bfloat16().float()) and float(found[-1]) == 1 and float(found[-2]) > 0
    least = torch.nextafter(found[:500].bfloat16(), torch.tensor(0.0, dtype=torch.bfloat16)).double()
    assert bool((found[:500].double() * 448 >= most.double() * (1 - 1e-7)).all())
    assert bool((least * 448 < most.double()).all())


def test_what_is_measured_is_the_largest_magnitude_that_transformers_caches(tmp_path: Path) -> None:
    subject = tiny()
    text = "".join(chr(97 + number * number % 26) for number in range(96))
    made = kvtailor.calibrate(subject, "static_fp8", {"t": text}, out=tmp_path / "s.safetensors", tokens=48, context=48)
    most = [torch.zeros(2), torch.zeros(2)]
    passages = [text[:48], text[48:96]]
    found = []
    for start in passages:
        cache = DynamicCache(config=subject.model.config)
        ids = subject.prompt(start)[:48]
        with torch.inference_mode():
            subject.model(ids[None], **hand_cache(cache))
        found.append([(layer.keys.abs().amax((0, 2, 3)), layer.values.abs().amax((0, 2, 3))) for layer in cache.layers])
    # One of the two passages was read.
    for side, name in enumerate(("key_scale", "value_scale")):
        ours = made.tensors[name]
        expected = [scales_of(torch.stack([layer[side] for layer in each])) for each in found]
        assert any(torch.allclose(ours, each, rtol=2**-7) for each in expected), (name, most)


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_weights_stay_and_scales_come_back_to_the_bit(
    checkpoint: Path, made: Calibration, tmp_path: Path, per: str
) -> None:
    written = export_scales(plan_of(checkpoint, per), checkpoint, tmp_path / "scaled")
    before = safetensors.torch.load_file(checkpoint / "model.safetensors")
    after = safetensors.torch.load_file(tmp_path / "scaled" / "model.safetensors")
    assert {*after} - {*before} == {*written.names} and len(written.names) == 2 * len(made.tensors["key_scale"])
    assert all(torch.equal(after[name], each) and after[name].dtype == each.dtype for name, each in before.items())
    heads = made.tensors["key_scale"].shape[1]
    first = after["model.layers.0.self_attn.k_scale"]
    assert first.dtype == torch.float32 and first.shape == ((1,) if per == "tensor" else (heads, 1, 1))
    config = json.loads((tmp_path / "scaled" / "config.json").read_text())
    assert (
        config["quantization_config"]["kv_cache_scheme"]["strategy"] == {"tensor": "tensor", "head": "attn_head"}[per]
    )
    assert "quantization_config" not in json.loads((checkpoint / "config.json").read_text())
    again = import_released("static_fp8", "demo", tmp_path / "scaled", out=tmp_path / "again.safetensors")
    for name, scales in made.tensors.items():
        expected = scales.amax(1, keepdim=True).expand_as(scales) if per == "tensor" else scales
        assert torch.equal(again.tensors[name], expected)


def test_both_files_make_the_same_cache(checkpoint: Path, made: Calibration, tmp_path: Path) -> None:
    export_scales(plan_of(checkpoint, "tensor"), checkpoint, tmp_path / "scaled")
    import_released("static_fp8", "demo", tmp_path / "scaled", out=tmp_path / "again.safetensors")
    model, tokenizer = kvtailor.load_model("demo")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :300]
    logits = []
    for plan in (plan_of(checkpoint, "tensor"), f"static_fp8(file='{tmp_path / 'again.safetensors'}')", "full"):
        cache = kvtailor.cache_for(model, plan)
        with torch.inference_mode():
            model(ids[:, :256], **hand_cache(cache))
            logits.append(model(ids[:, 256:], **hand_cache(cache)).logits)
        if plan != "full":
            assert cache.ledger().ratio < 0.6
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_shards_and_their_index(checkpoint: Path, made: Calibration, tmp_path: Path) -> None:
    model, tokenizer = kvtailor.load_model("demo")
    model.save_pretrained(tmp_path / "shards", max_shard_size="6MB")
    tokenizer.save_pretrained(tmp_path / "shards")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1
    written = export_scales(plan_of(checkpoint, "head"), tmp_path / "shards", tmp_path / "scaled")
    index = json.loads((tmp_path / "scaled" / "model.safetensors.index.json").read_text())
    for name in written.names:
        named = safetensors.torch.load_file(tmp_path / "scaled" / index["weight_map"][name])
        assert name in named
    old = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] - old["metadata"]["total_size"] == 8 * made.tensors["key_scale"].numel()


def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    checkpoint: Path, made: Calibration, tmp_path: Path
) -> None:
    plan = plan_of(checkpoint, "tensor")
    for wrong, why in ((f"snapkv + {plan} @ tokens=64", "drops tokens"), ("fp8", "no calibrated scales")):
        with pytest.raises(ArgumentError, match=why):
            export_scales(wrong, checkpoint, tmp_path / "new")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileError, match="there already"):
        export_scales(plan, checkpoint, tmp_path / "there")
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "below", tmp_path / ("long" * 100)):
        with pytest.raises(FileError, match="which failed"):
            export_scales(plan, checkpoint, out)
    (tmp_path / "file").unlink()
    with pytest.raises(FileError, match="no folder with"):
        write_scales(tmp_path / "there", *made.tensors.values(), tmp_path / "new", layers=(0,), per="tensor")
    scaled = export_scales(plan, checkpoint, tmp_path / "scaled").folder
    arguments = {"layers": range(len(made.tensors["key_scale"])), "per": "tensor"}
    with pytest.raises(FileError, match="kv_cache_scheme already"):
        write_scales(scaled, *made.tensors.values(), tmp_path / "new", **arguments)
    config = json.loads((scaled / "config.json").read_text())
    (scaled / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(FileError, match="of the scheme 'gptq'"):
        write_scales(scaled, *made.tensors.values(), tmp_path / "new", **arguments)
    (scaled / "config.json").write_text("{}")
    with pytest.raises(FileError, match="k_scale already"):
        write_scales(scaled, *made.tensors.values(), tmp_path / "new", **arguments)
    with pytest.raises(FileError, match="cannot be named there"):
        write_scales(checkpoint, *made.tensors.values(), tmp_path / "new", layers=(0, 99), per="tensor")
    with pytest.raises(FileError, match="found those of the keys of 0 layers"):
        read_scales(checkpoint)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["scaled", "there"]


def released(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """A checkpoint of nothing but scales."""
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scales(shape: tuple[int, ...] = (1,), dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.ones(shape, dtype=dtype)
        for layer in range(2)
        for side in "kv"
    }


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (3,), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_read_in_every_form_that_engines_load(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = read_scales(released(tmp_path / "c", scales(shape, dtype)))
    assert all(each.shape == (max(1, *shape, 1),) and bool((each == 1).all()) for each in found.keys.values())


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool, torch.uint8]
)
def test_numbers_that_are_no_scales_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(FileError, match="a scale of a cache is a float"):
        read_scales(released(tmp_path / "c", scales(dtype=dtype)))


@pytest.mark.parametrize("shape", [(0,), (1, 3), (3, 2), (1, 1, 1, 1), (3, 1, 2)])
def test_shapes_that_are_no_scales_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(FileError, match="one for a layer or"):
        read_scales(released(tmp_path / "c", scales(shape)))


def test_two_scales_for_one_side_of_a_layer_are_refused(tmp_path: Path) -> None:
    doubled = {**scales(), "model.layers.1.self_attn.attn.k_scale": torch.ones(1)}
    with pytest.raises(FileError, match="two scales for one side of layer 1"):
        read_scales(released(tmp_path / "names", doubled))
    folder = released(tmp_path / "files", scales())
    safetensors.torch.save_file(scales(), folder / "other.safetensors")
    with pytest.raises(FileError, match="in model.safetensors and in other.safetensors"):
        read_scales(folder)
    seen = {**scales(), "vision_model.layers.1.self_attn.k_scale": torch.ones(1)}
    assert len(read_scales(released(tmp_path / "vision", seen)).keys) == 2


@pytest.mark.parametrize(
    "scheme",
    [
        {"num_bits": 8, "type": "int", "symmetric": True},
        {"num_bits": 4, "type": "float", "symmetric": True},
        {"num_bits": 8, "type": "float", "symmetric": False},
        "NVFP4",
        5,
    ],
)
def test_scales_of_another_format_than_8_bit_floats_are_refused(tmp_path: Path, scheme: object) -> None:
    with pytest.raises(FileError, match="whose config.json says that they are of"):
        read_scales(released(tmp_path / "c", scales(), quantization_config={"kv_cache_scheme": scheme}))
    folder = released(tmp_path / "m", scales())
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": scheme}}))
    with pytest.raises(FileError, match="whose hf_quant_config.json says that they are of"):
        read_scales(folder)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    assert len(read_scales(folder).keys) == 2


def test_files_that_an_index_does_not_name_or_that_it_names_in_vain_are_refused(
    checkpoint: Path, made: Calibration, tmp_path: Path
) -> None:
    model, tokenizer = kvtailor.load_model("demo")
    shards = tmp_path / "shards"
    model.save_pretrained(shards, max_shard_size="6MB")
    tokenizer.save_pretrained(shards)
    arguments = {"layers": range(len(made.tensors["key_scale"])), "per": "tensor"}

    def refused(why: str) -> None:
        for act in (
            lambda: write_scales(shards, *made.tensors.values(), tmp_path / "new", **arguments),
            lambda: read_scales(shards),
        ):
            with pytest.raises(FileError, match=why):
                act()
        assert not (tmp_path / "new").exists()

    safetensors.torch.save_file(
        safetensors.torch.load_file(checkpoint / "model.safetensors"), shards / "copy.safetensors"
    )
    refused("copy.safetensors, which its model.safetensors.index.json does not name: a second copy")
    (shards / "copy.safetensors").unlink()
    os.mkfifo(shards / "pipe.safetensors")
    refused("pipe")
    (shards / "pipe.safetensors").unlink()
    (shards / "tokenizer.model").symlink_to("blob")
    with pytest.raises(FileError, match=r"has tokenizer\.model, a link to nothing"):
        write_scales(shards, *made.tensors.values(), tmp_path / "new", **arguments)
    (shards / "tokenizer.model").unlink()
    last = max(shards.glob("*.safetensors"))
    last.rename(tmp_path / "away")
    refused(f"has no {last.name}, which its model.safetensors.index.json names")
    (shards / "model.safetensors.index.json").write_text("[]")
    refused("no JSON object")
    (shards / "model.safetensors.index.json").write_text('{"weight_map": 5}')
    refused("no weight_map")


def test_a_pipe_among_the_weights_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="a pipe"):
        read_scales(tmp_path)


def test_scales_of_other_weights_are_refused(checkpoint: Path, made: Calibration, tmp_path: Path) -> None:
    model, tokenizer = kvtailor.load_model("demo")
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
        model.model.norm.weight.add_(0.01)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(CalibrationError, match="other weights"):
        export_scales(plan_of(checkpoint, "tensor"), tmp_path / "other", tmp_path / "new")


def test_the_command_writes_the_folder_and_says_how_to_serve_it(
    checkpoint: Path, made: Calibration, tmp_path: Path
) -> None:
    words = ["export", "compressed-tensors", plan_of(checkpoint, "head")]
    wrong = CliRunner().invoke(main, words)
    assert wrong.exit_code == 2 and "give --model" in wrong.output
    more = ["--model", str(checkpoint), "--out", str(tmp_path / "scaled")]
    result = CliRunner().invoke(main, [*words, *more, "--json"])
    assert result.exit_code == 0 and f"vllm serve {tmp_path / 'scaled'}\n" in result.output
    assert "Scales of single heads" in result.output
    assert len(json.loads(result.output.splitlines()[-1])["tensors"]) == 2 * len(made.tensors["key_scale"])
    assert "newest" not in result.output
    words[2] = words[2].replace(")", ", recent=32)")
    result = CliRunner().invoke(main, [*words, "--model", str(checkpoint), "--out", str(tmp_path / "newest")])
    assert result.exit_code == 0
    assert "the newest 32, which the plan keeps whole, have no counterpart" in " ".join(result.output.split())


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed: pip install --no-deps -t FOLDER compressed-tensors, on PYTHONPATH",
)
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_compressed_tensors_reads_the_folder_and_makes_the_same_numbers(
    checkpoint: Path, made: Calibration, tmp_path: Path, per: str
) -> None:
    """Its own reading of configuration, names and numbers.

    Not by loading the model: 0.20.0 looks for attention with an argument that transformers 5.24 has renamed.
    """
    written = export_scales(plan_of(checkpoint, per), checkpoint, tmp_path / "scaled")
    script = f"""
import json
import torch
from safetensors import safe_open
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.utils.safetensors_load import get_quantization_parameter_to_path_mapping
from kvtailor.calibration_file import read
from kvtailor.encode.contract import CodecContext
from kvtailor.encode.static_fp8 import StaticFp8
from kvtailor.types import Layout

folder = {str(tmp_path / "scaled")!r}
with open(folder + "/config.json") as file:
    args = QuantizationConfig.model_validate(json.load(file)["quantization_config"]).kv_cache_scheme
assert (args.num_bits, args.type, args.symmetric, args.dynamic) == (8, "float", True, False)
paths = get_quantization_parameter_to_path_mapping(folder)
assert {{*paths}} == {set(written.names)!r}
made = read({str(checkpoint.parent / "scales.safetensors")!r}, "static_fp8", "test")
count, heads = made.tensors["key_scale"].shape
for layer in range(count):
    codec = StaticFp8(file={str(checkpoint.parent / "scales.safetensors")!r}, per={per!r}).for_layer(
        CodecContext(layer=layer, layers=count, heads=heads, calibration=made.tensors)
    )
    # Up to three times what the scales take, so that some numbers are cut.
    states = torch.randn(1, heads, 50, 32, generator=torch.Generator().manual_seed(layer)) * 5
    segment = codec.encode(Layout(rows=1, heads=heads, size=50, start=0), states[0], states[0])
    for name, ours in zip("kv", segment.decode(), strict=True):
        full = f"model.layers.{{layer}}.self_attn.{{name}}_scale"
        with safe_open(paths[full], framework="pt") as file:
            scale = file.get_tensor(full)
        mine = made.tensors[("key" if name == "k" else "value") + "_scale"][layer]
        assert torch.equal(scale.flatten(), mine if {per!r} == "head" else mine.max().reshape(1)), (layer, name)
        theirs = fake_quantize(states, scale, None, args)
        assert torch.equal(theirs[0], ours), (layer, name, (theirs[0] - ours).abs().max())
print("read")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0 and result.stdout.strip().endswith("read"), result.stderr[-2000:]
