"""A saved compressed cache goes on identically, in this or another process."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from tests.seam.test_modes import PLANS, decoded
from tests.support.crossed import crossed
from tests.support.seam.zoo import ROUNDING, build, error, prompts


def continued(model, cache, mask, steps=6):
    """Greedy tokens (b, steps) and logits of a cache that goes on."""
    token, tokens, logits = prompts((1,) * len(mask), state=11)[0], [], []
    with torch.no_grad():
        for _ in range(steps):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            positions = mask.sum(-1, keepdim=True) - 1
            logits.append(model(token, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits)
            token = logits[-1].argmax(-1)
            tokens.append(token)
    return torch.cat(tokens, 1), torch.cat(logits, 1)


def saved(family: str, plan: str, path, lengths=(40, 33)):
    """A model, a cache that was saved while it held something, and its mask."""
    model = build(family)
    ids, mask = prompts(lengths)
    _, cache = decoded(model, ids, mask, plan, steps=3)
    cache.save(path)
    return model, cache, torch.cat([mask, mask.new_ones(2, 3)], 1)


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gemma3"], PLANS))
def test_a_saved_cache_goes_on_identically(family: str, plan: str, tmp_path) -> None:
    path = tmp_path / "cache.safetensors"
    model, cache, mask = saved(family, plan, path)
    loaded = kvtailor.load_cache(model, path)
    assert loaded.seen == cache.seen and torch.equal(loaded.held(), cache.held())
    expected, found = continued(model, cache, mask), continued(model, loaded, mask)
    assert torch.equal(found[0], expected[0])
    # Not bit for bit: a reloaded buffer has another stride, and with it another order of summation.
    assert error(found[1], expected[1]) < ROUNDING


def test_a_saved_cache_goes_on_in_another_process(tmp_path) -> None:
    """Which also sees that importing alone brings no transformers and registers nothing."""
    path, plan = tmp_path / "cache.safetensors", PLANS[5]
    model, cache, mask = saved("llama", plan, path)
    torch.save(mask, tmp_path / "mask.pt")
    script = (
        "import sys, torch, kvtailor\n"
        "assert 'transformers' not in sys.modules\n"
        "import kvtailor.hf.cache\n"
        "from transformers import AttentionInterface\n"
        "assert 'kvtailor' not in AttentionInterface().keys()\n"
        "from tests.seam.saving.test_saving import continued\n"
        "from tests.support.seam.zoo import build\n"
        "model = build('llama')\n"
        "cache = kvtailor.load_cache(model, sys.argv[1] + '/cache.safetensors')\n"
        "torch.save(continued(model, cache, torch.load(sys.argv[1] + '/mask.pt'))[0], sys.argv[1] + '/tokens.pt')\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=root)
    assert torch.equal(torch.load(tmp_path / "tokens.pt"), continued(model, cache, mask)[0])


@torch.no_grad()
def test_a_damaged_file_is_refused_by_name(tmp_path) -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "snapkv(window=6) @ tokens=16")
    model(prompts((30,))[0], **hand_cache(cache))
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CacheMisuse, match="cache.safetensors"):
        kvtailor.load_cache(model, path)
    with pytest.raises(CacheMisuse, match="absent"):
        kvtailor.load_cache(model, tmp_path / "absent.safetensors")
    cache.save(path)
    with pytest.raises(CacheMisuse, match="model_type"):
        kvtailor.load_cache(build("qwen2"), path)


@pytest.mark.parametrize("write", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())])
def test_a_cache_is_not_pickled(write) -> None:
    model = build("llama")
    ids, mask = prompts((40, 33))
    for cache in (kvtailor.cache_for(model, PLANS[5]), decoded(model, ids, mask, PLANS[5])[1]):
        with pytest.raises(CacheMisuse, match=r"cannot be pickled; write it with cache\.save.*kvtailor\.load_cache"):
            write(cache)


@pytest.mark.parametrize("plan", [PLANS[5], PLANS[14], PLANS[3]])
def test_a_cache_is_copied_all_the_same(plan: str, tmp_path) -> None:
    model, cache, mask = saved("gemma3", plan, tmp_path / "cache.safetensors")
    shallow, deep = copy.copy(cache), copy.deepcopy(cache)
    assert shallow.engine is cache.engine and vars(shallow) == vars(cache)
    assert all(layer.cache is deep for layer in deep.layers if hasattr(layer, "cache"))
    expected = continued(model, cache, mask)[1]
    assert torch.equal(continued(model, deep, mask)[1], expected)
