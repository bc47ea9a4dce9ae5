"""What is given as a model and is none, or one of another form, is named for what it is, with what to do."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.cli.run import command
from kvtailor.errors import KvtailorError, ModelNotFound
from kvtailor.hf.model.config import arguments_of, base_of, config_of, source_of
from kvtailor.hf.model.loading import new_model, save
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import ROUNDING, error

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = kvtailor.load_model("demo")[1]
    save(new_model("llama", **SIZES, num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer)), tokenizer, folder)
    return folder


def without(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def writing(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


def of_type(kind: str) -> Callable[[Path], Any]:
    """A model of another type, whose tokenizer transformers makes of nothing where its files are missing."""

    def change(folder: Path) -> None:
        without(*TOKENIZER)(folder)
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, "model_type": kind}))

    return change


def adapter(folder: Path) -> None:
    without("config.json", "model.safetensors")(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "demo", "peft_type": "LORA"}))


BROKEN: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no tokenizer": (without(*TOKENIZER), "", "a model without a tokenizer .no tokenizer.json.: put it there"),
    "a tokenizer of nothing, qwen2": (of_type("qwen2"), "", "a model without a tokenizer"),
    "a tokenizer of nothing, gpt2": (of_type("gpt2"), "", "a model without a tokenizer"),
    "a tokenizer of nothing, gemma": (of_type("gemma"), "", "a model without a tokenizer"),
    "a cut tokenizer": (writing("tokenizer.json", b'{"version": '), "", "the tokenizer in .* cannot be read"),
    "no weights": (without("model.safetensors"), "", "the model in .* cannot be read .*no file named"),
    "cut weights": (writing("model.safetensors", b"12345678" * 9), "", "the model in .* cannot be read"),
    "a cut config": (writing("config.json", b"{"), "", "in .* cannot be read .*config.json"),
    "no such type": (writing("config.json", b'{"model_type": "nobody"}'), "", "cannot be read .*nobody"),
    "no config": (without("config.json"), "", "it has no config.json: give a folder that save_pretrained"),
    "a file of weights": (lambda folder: None, "model.safetensors", "which is a file and no GGUF file: give the fold"),
    "a folder of GGUF files": (
        lambda folder: [without("config.json")(folder), writing("a.gguf", b"GGUF")(folder)],
        "",
        "give its GGUF file, .*a.gguf",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_or_file_that_is_no_whole_model(whole: Path, tmp_path: Path, name: str) -> None:
    change, inside, said = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    change(folder)
    with pytest.raises(ModelNotFound, match=said) as found:
        kvtailor.load_model(folder / inside)
    assert str(folder) in str(found.value)
    told = CliRunner().invoke(command, ["--model", str(folder / inside), "--prompt", "hello"])
    assert told.exit_code == 1 and isinstance(told.exception, SystemExit), told.exception


def test_packages_that_are_not_here_are_named(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "adapter"
    file.write_bytes(b"GGUF and more")
    shutil.copytree(whole, folder)
    adapter(folder)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("gguf", "peft") else found(name))
    for source, said in ((file, "is a GGUF file, .*pip install gguf"), (folder, "holds a PEFT adapter.*pip install p")):
        for ask in (kvtailor.load_model, lambda source: config_of(str(source))):
            with pytest.raises(ModelNotFound, match=said):
                ask(source)


def test_with_the_packages_transformers_is_given_what_it_takes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "adapter"
    file.write_bytes(b"GGUF and no more")
    shutil.copytree(whole, folder)
    adapter(folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert arguments_of(source_of(file)) == (str(tmp_path), {"gguf_file": "model.gguf"})
    assert base_of(source_of(folder)) == source_of("demo") and base_of("someone/model") == "someone/model"
    assert config_of(str(folder)).model_type == "llama"
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="does not say which model this adapter is for"):
        config_of(str(folder))


def test_a_part_of_a_gguf_file_is_not_its_folder_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has no tokenizer, and need not have one."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(2000))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "gguf" else found(name))
    for ask in (kvtailor.load_model, config_of):
        with pytest.raises(
            ModelNotFound, match=r"in .*model\.gguf cannot be read .*only a part of it is here .1.96 KiB"
        ):
            ask(str(file))


def test_an_adapter_answers_as_peft_does(whole: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, tokenizer = kvtailor.load_model(whole)
    torch.manual_seed(0)
    how = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    own = peft.get_peft_model(model, how)
    own.save_pretrained(tmp_path)
    loaded, _ = kvtailor.load_model(tmp_path)
    ids = tokenizer("hello you", return_tensors="pt").input_ids
    plain, _ = kvtailor.load_model(whole)
    with torch.no_grad():
        expected = own(ids).logits
        found = loaded(ids, **hand_cache(kvtailor.cache_for(loaded, "full"))).logits
        assert error(found, expected) < ROUNDING
        assert not torch.allclose(plain(ids).logits, expected)


def test_all_of_them_are_errors_of_ours() -> None:
    """And of the kinds that they were before."""
    assert issubclass(ModelNotFound, KvtailorError)
    assert issubclass(ModelNotFound, FileNotFoundError) and issubclass(ModelNotFound, ConnectionError)


def test_threads_that_read_models_at_once_get_whole_ones() -> None:
    ids = torch.arange(3, 20)[None]
    with ThreadPoolExecutor(3) as threads:
        models = list(threads.map(lambda _: kvtailor.load_model("demo", dtype=torch.float32)[0], range(6)))
    found = [model(ids).logits for model in models]
    assert all(torch.equal(found[0], each) for each in found[1:]) and found[0].isfinite().all()
