"""What counts as too little memory, and what a process that measures says of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.seam.zoo import build

from kvtailor.bench.measure import fresh
from kvtailor.bench.measure.memory_gauge import is_out_of_memory, out_of_memory
from kvtailor.errors import CacheMisuse


def accelerator() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nMore.")


FULL: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.empty(10**16),
    "numpy": lambda: np.empty(10**16),
    "python": lambda: bytearray(10**16),
    "accelerator": accelerator,
}


@pytest.mark.parametrize("where", FULL)
def test_memory_that_does_not_suffice_is_told_wherever_it_was_asked_for(where: str) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        FULL[where]()
    assert is_out_of_memory(caught.value)
    said = out_of_memory(caught.value)
    assert said.startswith("the memory did not suffice") and said.endswith("fewer rows need less")
    assert "\n" not in said and ("(" in said) == bool(str(caught.value))


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), CacheMisuse("used twice"), ValueError("no")])
def test_other_errors_are_none_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("where", FULL)
def test_a_fresh_process_answers_with_the_sentence(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {
        "model": "tiny",
        "dtype": "float32",
        "cache_dtype": "float32",
        "device": "cpu",
        "plan": None,
        "settings": {},
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr("kvtailor.hf.model.loading.load", lambda *args, **options: (build("llama"), None))
    fresh.answer(lambda *args: FULL[where]())
    assert json.loads(capsys.readouterr().out)["error"].startswith("the memory did not suffice")
