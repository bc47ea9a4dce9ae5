"""Speculation on the embedded models: the text of plain decoding, over a hundred tokens and, slowly, over 2,000."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.hf.model.loading import load
from kvtailor.hf.versions import hand_cache

TEXT = "The old mill stood at the end of the village. In the morning the miller's daughter went down to the river and "
SPECULATIONS = {
    "streaming": {"draft_plan": "streaming @ tokens=64"},
    "snapkv": {"draft_plan": "snapkv @ tokens=64, slack=32"},
    "retrieval": {"draft_plan": "retrieval @ tokens=64, slack=64", "refresh": 100},
    "quantised": {"draft_plan": "kivi(recent=32)"},
    "draft model": {"draft": "demo-draft"},
    "hierarchy": {"draft": "demo-draft", "draft_plan": "streaming @ tokens=64", "middle_plan": "snapkv @ tokens=96"},
}


def same_text(name: str, target: str, tokens: int) -> None:
    model, tokenizer = load("demo", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = tokenizer(TEXT * 12, return_tensors="pt").input_ids[:, :240]
    cache = kvtailor.cache_for(model, target)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), **hand_cache(cache), max_new_tokens=tokens, do_sample=False
    )
    found = kvtailor.generate(
        model, ids, plan=target, **SPECULATIONS[name], gamma=6, min_gain=None, max_new_tokens=tokens
    )
    assert torch.equal(found.sequences, expected)
    assert found.statistics.acceptance > 0.1
    assert found.statistics.emitted_per_verification > 1.2


@pytest.mark.parametrize(
    ("name", "target", "tokens"), [("snapkv", "full", 100), ("hierarchy", "kivi(bits=4, recent=32)", 60)]
)
def test_a_hundred_tokens(name: str, target: str, tokens: int) -> None:
    same_text(name, target, tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    "target",
    [
        "full",
        "vector(bits=8) + snapkv @ keep=0.5",
        "disk(on_device_layers=3)",
        "kivi(recent=32) + disk(resident_layers=2)",
    ],
)
@pytest.mark.parametrize("name", SPECULATIONS)
def test_two_thousand_tokens(name: str, target: str) -> None:
    same_text(name, target, 2000)
