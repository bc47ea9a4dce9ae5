"""A model in 16 bits on a CPU without arithmetic for them computes in float32, unless it is asked for otherwise."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.fresh import measured
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks import memory
from kvtailor.cli import main
from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.hf.model import loading
from kvtailor.hf.model.cache_dtype import dtype_of_caches
from kvtailor.hf.model.geometry import Geometry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bfloat16")
    model, tokenizer = kvtailor.load_model("demo")
    loading.save(model.to(torch.bfloat16), tokenizer, path)
    return path


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU has no arithmetic for bfloat16."""
    monkeypatch.setattr(loading, "cpu_computes", lambda dtype: dtype is not torch.bfloat16)


def loaded(folder: Path, **given: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = loading.load(folder, **given)
    return model, [str(each.message) for each in caught if "arithmetic" in str(each.message)]


def dtypes(folder: Path, **given: Any) -> tuple[torch.dtype, torch.dtype, int]:
    model, said = loaded(folder, **given)
    return model.dtype, dtype_of_caches(model), len(said)


@pytest.mark.usefixtures("without")
def test_float32_by_itself_and_a_line_says_so(folder: Path) -> None:
    model, said = loaded(folder)
    assert model.dtype is torch.float32 and "--dtype bfloat16" in said[0]
    found = CliRunner().invoke(main, ["check", "full", "--model", str(folder)])
    if not torch.cuda.is_available():
        words = " ".join(found.output.split())
        assert found.exit_code == 0 and "computes in float32" in words and "its cache stays bfloat16" in words


def test_its_cache_stays_in_the_checkpoints_dtype_and_another_line_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = []
    for computes in (True, False):
        monkeypatch.setattr(loading, "cpu_computes", lambda dtype, computes=computes: computes)
        model, said = loaded(folder)
        assert ["its cache stays bfloat16" in each for each in said] == [False, True][: len(said)]
        cache = kvtailor.prefill(model, torch.full((1, 300), 7), plan="kivi4")
        ledgers.append(cache.ledger())
    assert len(said) == 2
    assert ledgers[0].full == ledgers[1].full and ledgers[0].by_stage == ledgers[1].by_stage


@pytest.mark.usefixtures("without")
def test_whoever_names_a_dtype_has_it(folder: Path) -> None:
    half, single = torch.bfloat16, torch.float32
    assert dtypes(folder) == (single, half, 2)
    assert dtypes(folder, dtype=half) == (half, half, 0)
    assert dtypes(folder, dtype=single) == (single, single, 0)
    assert dtypes(folder, cache_dtype=single) == (single, single, 1)
    assert dtypes(folder, cache_dtype=torch.float16) == (single, torch.float16, 1)
    with pytest.raises(ArgumentError, match="asked for a cache in float16 of a model in bfloat16"):
        loaded(folder, dtype=half, cache_dtype=torch.float16)


@pytest.mark.usefixtures("without")
def test_another_process_has_the_same_dtypes_whatever_its_cpu_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject.load(str(folder))
    assert (subject.dtype, subject.cache_dtype) == (torch.float32, torch.bfloat16)
    monkeypatch.setattr(loading, "cpu_computes", lambda dtype: True)
    assert subject.elsewhere is not None
    there = subject.elsewhere()
    assert (there.dtype, there.cache_dtype) == (torch.float32, torch.bfloat16)
    settings = {"context": 32, "batch": 1, "caches": 1}
    found = measured(memory.__name__, subject, Contestant.of("full"), settings, limit=300)
    assert found["bytes_full"] == Geometry.of(subject.model.config).full_bytes(1, 32, torch.bfloat16.itemsize)


@pytest.mark.usefixtures("without")
def test_a_draft_that_is_named_has_caches_like_the_targets(folder: Path) -> None:
    model, _ = loaded(folder)
    found = kvtailor.generate(model, torch.full((1, 60), 7), plan="full", draft=str(folder), max_new_tokens=6)
    assert found.cache.layers[0].dtype is found.drafts[0].layers[0].dtype is torch.bfloat16


@pytest.mark.usefixtures("without")
def test_the_command_line_says_of_which_dtype_its_bytes_are(folder: Path) -> None:
    words = ["run", "--model", str(folder), "--prompt", "The ferry left the island", "--max-new-tokens", "4", "--json"]
    found = {}
    for asked in (None, "float32", "float16"):
        done = CliRunner().invoke(main, [*words, *(["--cache-dtype", asked] if asked else [])])
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout.splitlines()[-1])
        assert f"full in {told['cache_dtype']}:" in done.stderr
        found[asked] = told["dtype"], told["cache_dtype"], told["bytes_full"]
    (_, _, single), (_, _, half) = found["float32"], found["float16"]
    assert found[None] == ("float32", "bfloat16", half) and single == 2 * half
    refused = CliRunner().invoke(main, [*words, "--dtype", "bfloat16", "--cache-dtype", "float16"])
    assert refused.exit_code and "asked for a cache in float16 of a model in bfloat16" in refused.stderr
    unknown = CliRunner().invoke(main, [*words, "--cache-dtype", "int4x"])
    assert unknown.exit_code and "asked for dtype 'int4x'" in unknown.stderr


def test_a_cpu_that_has_it_keeps_the_models_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_computes", lambda dtype: True)
    assert dtypes(folder) == (torch.bfloat16, torch.bfloat16, 0)


def test_onednn_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.cpu_computes(torch.float32) and loading.cpu_computes(None)
    if torch.backends.mkldnn.is_available():
        assert loading.cpu_computes(torch.bfloat16) is bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert loading.cpu_computes(torch.bfloat16)


@pytest.mark.parametrize("name", ["foo", "int4", "int64", "float8_e4m3fn"])
def test_a_dtype_that_no_model_computes_in_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(KvtailorError, match=f"asked for dtype '{name}': give float32, bfloat16 or float16"):
        Subject.load("demo", dtype=name)
