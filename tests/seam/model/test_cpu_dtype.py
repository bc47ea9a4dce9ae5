"""A model in 16 bits on a CPU without arithmetic for them computes in float32, unless it is asked for otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.cli import main
from kvtailor.hf.model import loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bfloat16")
    model, tokenizer = kvtailor.load_model("demo")
    loading.save(model.to(torch.bfloat16), tokenizer, path)
    return path


def loaded(folder: Path, **given: Any) -> tuple[torch.dtype, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = loading.load(folder, **given)
    return model.dtype, [str(each.message) for each in caught if "arithmetic" in str(each.message)]


def test_float32_by_itself_and_one_line_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_computes", lambda dtype: dtype is not torch.bfloat16)
    dtype, said = loaded(folder)
    assert dtype is torch.float32 and len(said) == 1 and "--dtype bfloat16" in said[0]
    assert loaded(folder, dtype=torch.bfloat16) == (torch.bfloat16, [])
    found = CliRunner().invoke(main, ["check", "full", "--model", str(folder)])
    if not torch.cuda.is_available():
        assert found.exit_code == 0 and "computes in float32" in " ".join(found.output.split())


def test_a_cpu_that_has_it_keeps_the_models_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_computes", lambda dtype: True)
    assert loaded(folder) == (torch.bfloat16, [])


def test_onednn_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.cpu_computes(torch.float32) and loading.cpu_computes(None)
    if torch.backends.mkldnn.is_available():
        assert loading.cpu_computes(torch.bfloat16) is bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert loading.cpu_computes(torch.bfloat16)
