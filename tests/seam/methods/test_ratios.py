"""The numbers of docs/ratios.md, from the ledger of caches that hold the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import kvtailor
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.hf.versions import hand_cache
from tests.support.calibrated import write_file

PAGE = (Path(__file__).parents[3] / "docs" / "ratios.md").read_text(encoding="utf-8")
TOKENS, HEADS = 300, 2


def tiny(size: int):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=size,
        max_position_embeddings=512,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()


@pytest.mark.parametrize(
    ("size", "plan", "token", "said"),
    [
        (128, "kvplugin(rank=96, only=values", 448, "| 448 | 1.14x |"),
        (128, "kvplugin_v9", 354, "| 354 | 1.45x |"),
        (128, "kvplugin(rank=96, bits=8, only=values", 354, "| 354 | 1.45x |"),
        (128, "kvplugin(rank=80, bits=8, only=values", 338, "| 338 | 1.51x, published as 3.20x |"),
        (64, "kvplugin(rank=56, bits=8, only=values", 186, "| 186 | 1.38x, published as 2.29x |"),
        (64, "kvplugin(rank=60, bits=8, only=values", 190, "| 190 | 1.35x, published as 2.13x |"),
        (64, "orthogonal(rank=128", 256, "128 directions are all there are: 1x"),
        (64, "orthogonal(rank=64", 128, "64 of them are 2x"),
    ],
)
@torch.no_grad()
def test_a_token_of_a_head_takes_what_the_page_says(size: int, plan: str, token: int, said: str, tmp_path) -> None:
    model = tiny(size)
    if plan.startswith("kvplugin"):
        generator = torch.Generator().manual_seed(0)
        tensors = LowRank.example_calibration(layers=1, heads=HEADS, group=1, size=size, generator=generator)
        file = write_file(tmp_path / "moments.safetensors", "lowrank", tensors, model)
        if plan == "kvplugin_v9":
            plan = "kvplugin(rank=0.75, bits=8, only=values"
        plan += f", file='{file}'"
    cache = kvtailor.cache_for(model, f"{plan})" if "(" in plan else plan)
    model(torch.randint(0, 50, (1, TOKENS)), **hand_cache(cache))
    ledger = cache.ledger()
    assert ledger.full == TOKENS * HEADS * 4 * size
    assert ledger.by_stage["encode"] == ledger.total == ledger.closed_form == TOKENS * HEADS * token
    assert said in PAGE
    if "published" in said or "| 1." in said:
        assert f"{ledger.full / ledger.total:.2f}x" in said
