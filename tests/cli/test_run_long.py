"""`kvtailor run` on prompts that are long, and on models that are not there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.cli import run
from kvtailor.hf.model import loading
from kvtailor.hf.model.config import check_hub, config_of
from kvtailor.hf.model.loading import load, new_model, save
from kvtailor.hf.versions import hand_cache

LONG = "The baker of the town found a silver spoon under the old bridge. " * 12
ROLLING = "streamingllm @ tokens=64"


def invoke(*words: str):
    return CliRunner().invoke(run.command, [*words, "--json"])


def last(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with rotary positions for 128 tokens."""
    return _tiny(tmp_path_factory.mktemp("models") / "short", "llama", max_position_embeddings=128)


def _tiny(folder: Path, kind: str, **config: int) -> Path:
    tokenizer = load("demo")[1]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = new_model(kind, vocab_size=len(tokenizer), **{**sizes, **config})
    save(model, tokenizer, folder)
    return folder


def test_a_chunked_prompt_gives_the_text_of_chunks_by_hand() -> None:
    model, tokenizer = load("demo")
    ids = tokenizer(LONG, return_tensors="pt").input_ids
    plan = "snapkv @ tokens=48"
    found = last(invoke("--plan", plan, "--prompt", LONG, "--max-new-tokens", "4", "--chunk", "40"))
    whole = last(invoke("--plan", plan, "--prompt", LONG, "--max-new-tokens", "4"))
    assert found["tokens_held"] <= 48 + 40 and found["tokens_seen"] == whole["tokens_seen"] == ids.shape[1] + 3
    chunked = kvtailor.cache_for(model, plan)
    with torch.inference_mode():
        out = model.generate(ids, **hand_cache(chunked), prefill_chunk_size=40, max_new_tokens=4, do_sample=False)
    assert found["text"] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_plan_that_reads_twice_reads_in_chunks() -> None:
    words = ["--plan", "kvzip @ tokens=48", "--prompt", LONG, "--max-new-tokens", "3"]
    one, other = last(invoke(*words)), last(invoke(*words, "--chunk", "64"))
    assert one["text"] == other["text"] and other["tokens_held"] < 56


def test_beyond_is_what_streamingllm_is_for(short: Path) -> None:
    """More tokens than positions, before and while decoding, and no distance beyond them: no warning."""
    words = ["--model", str(short), "--plan", ROLLING, "--prompt", LONG, "--max-new-tokens", "30"]
    refused = invoke(*words)
    assert refused.exit_code == 1 and "or --beyond" in refused.output
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = last(invoke(*words, "--beyond", "--chunk", "32"))
    assert found["new_tokens"] == 30 and found["tokens_seen"] > 128 > found["tokens_held"]
    for wrong in (["--beyond"], ["--beyond", "--chunk", "100"], ["--beyond", "--chunk", "32", "--plan", "full"]):
        with pytest.warns(UserWarning, match="made for 128 positions"):
            last(invoke(*words, *wrong))


def test_beyond_a_table_of_positions_is_refused_before_the_prompt(tmp_path: Path) -> None:
    folder = _tiny(tmp_path / "table", "gpt2", n_embd=32, n_layer=2, n_head=2, n_positions=128)
    result = invoke("--model", str(folder), "--plan", "full", "--prompt", LONG, "--beyond")
    assert result.exit_code == 1 and "table (transformer.wpe)" in result.output and "Traceback" not in result.output


def test_a_model_that_is_not_on_disk_is_said_after_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(request: urllib.request.Request, timeout: float) -> None:
        asked.append((request.full_url, timeout))
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    for name in ("AutoTokenizer", "AutoModelForCausalLM"):
        monkeypatch.setattr(getattr(loading, name), "from_pretrained", None)
    result = invoke("--model", "nobody/nothing", "--prompt", "x")
    assert result.exit_code == 1 and "does not answer" in result.output and "no network here" in result.output
    assert len(asked) == 1 and asked[0][1] <= 3
    with pytest.raises(kvtailor.KvtailorError, match="does not answer"):
        config_of("nobody/nothing")
    assert len(asked) == 2
    assert "no model has such a name" in invoke("--model", "a/b/c", "--prompt", "x").output
    assert len(asked) == 2


def test_a_hub_that_answers_anything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.HTTPError(request.full_url, 403, "forbidden", None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(urllib.request, "urlopen", refuses)
    check_hub("nobody/nothing")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE forbids"):
        check_hub("nobody/nothing")


@pytest.mark.long
def test_what_the_hub_left_on_disk_is_read_without_a_word_to_it_and_python_m_runs(short: Path, tmp_path: Path) -> None:
    place = tmp_path / "hub" / "models--someone--short"
    shutil.copytree(short, place / "snapshots" / "0a")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0a")
    words = ["run", "--model", "someone/short", "--prompt", "Once upon a time", "--max-new-tokens", "3", "--json"]
    guard = (
        "import runpy, socket, sys\n"
        "def none(*given): raise AssertionError('a connection was asked for')\n"
        "socket.socket.connect = socket.getaddrinfo = none\n"
        f"sys.argv = ['kvtailor', *{words}]\n"
        "runpy.run_module('kvtailor', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", guard],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["model"] == "someone/short"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "1e-300"), ("--seed", "9" * 26)],
)
def test_numbers_that_cannot_be_sampled_with_are_refused(option: str, value: str) -> None:
    outcome = CliRunner().invoke(run.command, ["--model", "demo", "--prompt", "x", option, value])
    assert outcome.exit_code == 2 and f"Invalid value for '{option}'" in outcome.output
