"""A context that was read goes on in another process: `Reading.save` and `Reading.load`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvtailor
from kvtailor.errors import CacheFileError

TEXT = "The ferry left the island twice a day. The code of the gate is 48213. " * 12
ASKED = [" What is the code of the gate? It is", " The ferry left"]


@pytest.fixture(scope="module")
def reading() -> kvtailor.Reading:
    model, tokenizer = kvtailor.load_model("demo", dtype="float32")
    return kvtailor.read(model, tokenizer, TEXT, plan="snapkv + kivi(bits=4, recent=32) @ keep=0.5", answer_prefix=" :")


@pytest.mark.together
def test_another_process_answers_the_same(reading: kvtailor.Reading, tmp_path: Path) -> None:
    path = tmp_path / "document.safetensors"
    reading.save(path)
    there = (
        "import kvtailor\n"
        "model, tokenizer = kvtailor.load_model('demo', dtype='float32')\n"
        f"reading = kvtailor.Reading.load(model, tokenizer, {str(path)!r})\n"
        f"print(repr(reading.ask({ASKED!r}, max_new_tokens=8, do_sample=False).texts))\n"
    )
    done = subprocess.run([sys.executable, "-c", there], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(reading.ask(ASKED, max_new_tokens=8, do_sample=False).texts)
    assert kvtailor.load_cache(reading.model, path).seen == reading.cache.seen


@pytest.mark.together
def test_what_is_no_reading_is_refused(reading: kvtailor.Reading, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    reading.cache.save(path)
    with pytest.raises(CacheFileError, match=r"Reading\.save"):
        kvtailor.Reading.load(reading.model, reading.prompt.tokenizer, path)


@pytest.mark.together
def test_another_tokenizer_is_refused(reading: kvtailor.Reading, tmp_path: Path) -> None:
    path = tmp_path / "document.safetensors"
    reading.save(path)
    other = kvtailor.load_model("demo", dtype="float32")[1]
    other.add_tokens(["wrote"])
    with pytest.raises(CacheFileError, match="another tokenizer"):
        kvtailor.Reading.load(reading.model, other, path)


@pytest.mark.together
def test_it_is_shown_without_its_model(reading: kvtailor.Reading) -> None:
    shown = repr(reading)
    assert len(shown) < 400 and "Llama" not in shown and "snapkv" in shown and str(reading.ids.shape[1]) in shown
