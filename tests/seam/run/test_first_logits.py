"""A model whose logits are NaN writes no text that looks like one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import kvtailor
from kvtailor.cli import main
from kvtailor.errors import KvtailorError
from tests.support.seam.zoo import build, prompts

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def by_session(model: Any, ids: Tensor) -> Any:
    with kvtailor.session(model, "kivi(bits=4, recent=32)") as s:
        return s.generate(ids, **GREEDY)


def by_beams(model: Any, ids: Tensor) -> Any:
    with kvtailor.session(model, "kivi(bits=4, recent=32)") as s:
        return s.generate(ids, num_beams=2, **GREEDY)


def by_drafts(model: Any, ids: Tensor) -> Any:
    return kvtailor.generate(model, ids, plan="kivi(bits=4, recent=32)", draft_plan="full", max_new_tokens=4)


@pytest.mark.parametrize("write", [by_session, by_beams, by_drafts])
def test_a_weight_that_is_no_number_is_named(write: Callable[[Any, Tensor], Any]) -> None:
    model, ids = build("llama"), prompts((30, 30))[0]
    write(model, ids)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(KvtailorError, match=r"logits after this prompt are NaN.*layers\.1\.mlp\.up_proj\.weight"):
        write(model, ids)


def test_answers_and_the_command_refuse_too(tmp_path: Path) -> None:
    model, tokenizer = kvtailor.load_model("demo")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    for plan in ("full", "kivi4"):
        with pytest.raises(KvtailorError, match="logits after this prompt are NaN"):
            kvtailor.read(model, tokenizer, plan=plan, context="It was a dark night.").ask("Who?", max_new_tokens=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = ["run", "--model", str(tmp_path), "--plan", "kivi4", "--prompt", "It was", "--max-new-tokens", "3"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 2 and "layers.0.mlp.up_proj.weight" in "".join(result.output.split())


def test_a_used_cache_is_told_apart_and_a_caller_s_processors_stay() -> None:
    model, ids = build("llama"), prompts((30,))[0]

    class Forced(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -torch.inf).index_fill_(-1, torch.tensor([7]), 0.0)

    with kvtailor.session(model, "full") as s:
        out = s.generate(ids, logits_processor=LogitsProcessorList([Forced()]), **GREEDY)
        assert out[0, 30:].tolist() == [7] * 4
        used = s.last
        model.lm_head.register_forward_hook(lambda module, given, logits: logits * torch.nan)
        with pytest.raises(KvtailorError, match="its weights are numbers, so float32 is too narrow"):
            s.generate(ids, **GREEDY)
        s.generate(ids, remove_invalid_values=True, **GREEDY)
        with pytest.raises(KvtailorError, match="on a cache that had seen other tokens"):
            s.generate(torch.cat([out, ids], 1), cache=used, **GREEDY)
