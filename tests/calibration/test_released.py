"""What other projects released: tiny files of their formats, read, and what they are refused for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from tests.support.calibrated import tiny
from tests.support.held_rows import held_of, make_row
from tests.support.seam.zoo import prompts

import kvtailor
from kvtailor.calibration.released import import_released
from kvtailor.cli.calibrate import command
from kvtailor.cli.words.plan import lines_of
from kvtailor.errors import CalibrationError, UnknownName
from kvtailor.hf.versions import hand_cache
from kvtailor.score.by_keys.qfilters import QFilters

SUBJECT = tiny()


def filters_file(folder: Path, *shape: int) -> Path:
    """As the hub's `nthngdy/*_qfilt` repositories have it."""
    folder.mkdir(exist_ok=True)
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    safetensors.torch.save_file({"q_filters": tensor}, folder / "model.safetensors")
    sizes = dict(zip(("num_layers", "num_kv_heads", "kv_head_dim"), shape, strict=True))
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def test_filters_score_by_minus_their_projection(tmp_path: Path) -> None:
    folder = filters_file(tmp_path / "qfilt", 3, 2, 16)
    made = import_released("qfilters", SUBJECT, folder, out=tmp_path / "q.safetensors")
    theirs = safetensors.torch.load_file(folder / "model.safetensors")["q_filters"]
    row = make_row(9, heads=2, group=2, size=16, generator=torch.Generator().manual_seed(1))
    held = held_of([row], QFilters().needs, calibration=made.of_layer(1))
    scores = QFilters().score(held)
    for head in range(2):
        for token in range(9):
            product = sum(float(a) * float(b) for a, b in zip(theirs[1, head], row.keys[head, token], strict=True))
            assert scores[0, head, token].item() == pytest.approx(-product, rel=1e-4, abs=1e-5)
    assert made.facts["released"]["beside"]["num_kv_heads"] == 2 and "not known" in made.facts["verdict"]
    assert any("from model.safetensors, which another project released" in line for line in lines_of(made))
    cache = kvtailor.cache_for(SUBJECT.model, f"qfilters(file='{tmp_path / 'q.safetensors'}') @ tokens=12")
    SUBJECT.model(prompts((40,))[0], **hand_cache(cache))
    assert cache.held().double().mean() == 12


def test_a_pattern_is_cut_to_0_and_1_and_serves_its_model_alone(tmp_path: Path) -> None:
    pattern = tmp_path / "full_attention_heads.tsv"
    pattern.write_text("1.5\t0.25\n-0.1\t9e-1\n0.000\t1.0\n")
    (tmp_path / "config.json").write_text('{"sink_size": 64, "recent_size": 256}')
    made = import_released("duo", SUBJECT, pattern, out=tmp_path / "d.safetensors")
    assert made.tensors["gates"].tolist() == torch.tensor([[1.0, 0.25], [0.0, 0.9], [0.0, 1.0]]).tolist()
    assert made.facts["released"]["beside"] == {"sink_size": 64, "recent_size": 256}
    plan = f"position + duo(file='{tmp_path / 'd.safetensors'}', streaming=4) @ tokens=12"
    kvtailor.cache_for(SUBJECT.model, plan)
    with pytest.raises(CalibrationError, match="other weights of the same shapes"):
        kvtailor.cache_for(tiny(state=1).model, plan)


def test_a_curve_has_ratios_first_and_ours_last(tmp_path: Path) -> None:
    theirs = np.sort(np.random.default_rng(0).random((99, 3, 2)), axis=0)
    np.save(tmp_path / "ea.npy", theirs)
    made = import_released("lukv", SUBJECT, tmp_path / "ea.npy", out=tmp_path / "l.safetensors")
    for ratio, layer, head in ((0, 0, 1), (49, 2, 0), (98, 1, 1)):
        assert float(made.tensors["pruned"][layer, head, ratio]) == pytest.approx(theirs[ratio, layer, head])
    kvtailor.cache_for(SUBJECT.model, f"expected + lukv(file='{tmp_path / 'l.safetensors'}') @ tokens=12")
    np.save(tmp_path / "short.npy", theirs[:98])
    np.save(tmp_path / "wide.npy", theirs[:, :, :1])
    (tmp_path / "none.npy").write_bytes(b"zzz")
    for name, sentence in (("short", "has shares from 0 to 1"), ("wide", "1 kv heads"), ("none", "no NumPy array")):
        with pytest.raises(CalibrationError, match=sentence):
            import_released("lukv", SUBJECT, tmp_path / f"{name}.npy", out=tmp_path / "o.safetensors")


@pytest.mark.parametrize(
    ("kind", "name", "content", "sentence"),
    [
        ("duo", "full_attention_heads.tsv", "0.1\t0.2\n0.3\n", "lines of .1, 2. numbers"),
        ("duo", "full_attention_heads.tsv", "a\tb\n", "no table of numbers"),
        ("duo", "full_attention_heads.tsv", "nan\t0.1\n", "finite number"),
        ("duo", "full_attention_heads.tsv", "0.1\t0.2\n", "1 layers x 2 kv heads, and tiny llama has 3 layers x 2"),
        ("qfilters", "model.safetensors", "zzzzzzzzzzzz", "no safetensors file"),
    ],
)
def test_what_is_of_no_such_format_is_refused(
    kind: str, name: str, content: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CalibrationError, match=sentence):
        import_released(kind, SUBJECT, tmp_path, out=tmp_path / "o.safetensors")
    assert not (tmp_path / "o.safetensors").exists()


def test_other_tensors_kinds_and_files_that_are_there_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weights": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CalibrationError, match="holds weights, and released Q-filters are"):
        import_released("qfilters", SUBJECT, tmp_path, out=tmp_path / "o.safetensors")
    with pytest.raises(CalibrationError, match="there is no file"):
        import_released("duo", SUBJECT, tmp_path, out=tmp_path / "o.safetensors")
    with pytest.raises(UnknownName):
        import_released("erank", SUBJECT, tmp_path, out=tmp_path / "o.safetensors")
    with pytest.raises(CalibrationError, match="is there already"):
        import_released("qfilters", SUBJECT, tmp_path, out=tmp_path / "model.safetensors")


def test_the_command_measures_nothing_of_what_was_released(tmp_path: Path) -> None:
    folder = filters_file(tmp_path / "qfilt", 6, 2, 64)
    words = ["qfilters", "--released", str(folder), "--out", str(tmp_path / "q.safetensors")]
    said = CliRunner().invoke(command, words)
    assert said.exit_code == 0 and "which another project released" in said.output, said.output
    refused = CliRunner().invoke(command, [*words, "--tokens", "10"])
    assert refused.exit_code == 2 and "--released measures nothing" in refused.output
