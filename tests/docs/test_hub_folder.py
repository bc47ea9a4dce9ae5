"""The folder for the hub: transformers loads it as it would from there, and the text is that of a session."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.seam.zoo import build

import kvtailor
from kvtailor.hf.versions import hand_cache, read_cache

FOLDER = Path(__file__).parents[2] / "examples" / "hub"
PLAN = "snapkv(window=4) + adakv @ tokens=12"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy, and a folder of its own for the module that transformers makes of it."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return str(shutil.copytree(FOLDER, tmp_path / "generate-here"))


def asked(model: Any, hub: str, **more: Any) -> Any:
    ids = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(3))
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), **more}
    return model.generate(ids, custom_generate=hub, trust_remote_code=True, **how)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
def test_it_gives_the_text_of_a_session_and_the_cache(family: str, hub: str) -> None:
    model = build(family)
    found = asked(model, hub, plan=PLAN, return_dict_in_generate=True)
    ids = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(3))
    with kvtailor.session(model, PLAN) as session:
        same = session.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(found.sequences, same)
    named = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=hub,
        trust_remote_code=True,
        plan=PLAN,
        max_new_tokens=6,
        do_sample=False,
    )
    assert torch.equal(named, same)
    ledger = read_cache(found).ledger()
    assert ledger.seen == 45 and ledger.held < 20 and 0 < ledger.total < ledger.full


def test_the_full_plan_gives_the_models_own_text(hub: str) -> None:
    model = build("llama")
    ids = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(3))
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(asked(model, hub, plan="full"), own)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False), own)


def test_what_it_cannot_do_is_refused(hub: str) -> None:
    from transformers import DynamicCache

    model = build("llama")
    with pytest.raises(ValueError, match="without a plan: give plan="):
        asked(model, hub)
    with pytest.raises(ValueError, match="the cache given is a DynamicCache"):
        asked(model, hub, plan=PLAN, **hand_cache(DynamicCache(config=model.config)))
    with pytest.raises(ValueError, match="under the plan knorm @ keep=0.5"):
        asked(model, hub, plan=PLAN, **hand_cache(kvtailor.cache_for(model, "knorm @ keep=0.5")))
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(torch.ones(1, 4, dtype=torch.int64), custom_generate=hub, plan=PLAN, trust_remote_code=False)


def test_the_next_turn_goes_on_with_the_cache(hub: str) -> None:
    model = build("llama")
    first = asked(model, hub, plan=PLAN, return_dict_in_generate=True)
    more = torch.cat([first.sequences, torch.full((2, 3), 7)], 1)
    found = model.generate(
        more,
        custom_generate=hub,
        trust_remote_code=True,
        plan=PLAN,
        **hand_cache(read_cache(first)),
        attention_mask=torch.ones_like(more),
        max_new_tokens=3,
        do_sample=False,
    )
    assert found.shape == (2, more.shape[1] + 3) and read_cache(first).seen == more.shape[1] + 2


def test_the_folder_has_what_the_hub_wants() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.match(r"---\n.*\btags:\n- custom_generate\n.*---\n", text, re.DOTALL)
    assert (FOLDER / "custom_generate" / "requirements.txt").read_text(encoding="utf-8").split() == ["kvtailor"]
    code = (FOLDER / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    assert re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE) == ["kvtailor"]
