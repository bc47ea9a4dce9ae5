"""What is read is what is held, on models whose layers are not all alike; and a wrong answer would show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.seam.methods.test_truth_of_presets import Stored, check_stored
from tests.support.seam.layer_kinds import FEW, HYBRIDS, MIXED
from tests.support.seam.zoo import ROUNDING, build, error, held_columns, prompts

KINDS = [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in (*HYBRIDS, *MIXED)]
EVICTING = (
    "snapkv(window=4) @ tokens=20",
    "snapkv(window=4) + adakv @ tokens=20",
    "streaming @ tokens=20",
    "h2o(recent=4) @ tokens=20, slack=4",
    "tova @ tokens=20, slack=2",
    "snapkv(window=4) + dynamickv @ tokens=20",
    "kvzip @ tokens=20",
)
ENCODING = (
    "kivi(bits=4, group=8, recent=8)",
    "vector(bits=8)",
    "snapkv(window=4) + adakv + vector(bits=8) @ tokens=20",
)
# Kept sets are equal; sums of single precision in another order differ by this much after so many layers.
ROUNDED = {"zamba2": 1e-3}
PLANS = [
    *((family, plan) for family in FEW for plan in (EVICTING[0], EVICTING[3], ENCODING[0])),
    *(("qwen3_next", plan) for plan in (*EVICTING, *ENCODING)),
    *(("gemma4_shared", plan) for plan in (*EVICTING, *ENCODING)),
]
SHORT = list(dict.fromkeys(PLANS))
ALL = [(family, plan) for family in (*HYBRIDS, *MIXED) for plan in (*EVICTING, *ENCODING)]


@pytest.mark.parametrize(
    ("family", "plan"),
    [*SHORT, *(pytest.param(*pair, marks=pytest.mark.long) for pair in ALL if pair not in SHORT)],
)
def test_what_is_read_is_what_is_held(family: str, plan: str) -> None:
    if family in ("jamba", "zamba") and plan.startswith("kvzip"):
        with pytest.raises(CacheMisuse, match="begins its recurrent state anew"):
            kvtailor.prefill(build(family), *prompts((20,)), plan=plan)
        return
    check_stored(family, Plan.parse(plan), (61, 40, 33), steps=6, most=ROUNDED.get(family, 2e-5))


@pytest.mark.parametrize("family", KINDS)
@torch.no_grad()
def test_a_reference_that_sees_dropped_tokens_is_far_off(family: str) -> None:
    """Which tokens are seen matters in these models, so the tests above can fail."""
    model, reference = build(family), Stored(family)
    ids, mask = prompts((61, 40, 33))
    reference(ids, mask, {})
    cache = kvtailor.prefill(model, ids, mask, plan="snapkv(window=4) @ tokens=20")
    token, mask = torch.tensor([[5], [9], [17]]), torch.cat([mask, mask.new_ones(3, 1)], 1)
    options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
    found = model(token, **hand_cache(cache), **options).logits
    assert error(found, reference(token, mask, {})) > 0.1


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "falcon_h1" else pytest.mark.long) for name in (*HYBRIDS, *MIXED)],
)
@torch.no_grad()
def test_saved_and_loaded_in_another_process(family: str, tmp_path: Path) -> None:
    model = build(family)
    ids, mask = prompts((41, 33))
    cache = kvtailor.prefill(model, ids, mask, plan="snapkv(window=4) + vector(bits=8) @ tokens=20, slack=4")
    cache.save(tmp_path / "cache.safetensors")
    token, mask = torch.tensor([[5], [9]]), torch.cat([mask, mask.new_ones(2, 1)], 1)
    options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
    expected = model(token, **hand_cache(cache), **options).logits
    script = (
        "import sys, torch, kvtailor\n"
        "from tests.support.seam.zoo import build\n"
        "from kvtailor.hf.versions import hand_cache\n"
        f"model = build({family!r})\n"
        f"cache = kvtailor.load_cache(model, {str(tmp_path / 'cache.safetensors')!r})\n"
        f"mask = torch.tensor({mask.tolist()})\n"
        "options = {'attention_mask': mask, 'position_ids': mask.sum(-1, keepdim=True) - 1}\n"
        "with torch.no_grad():\n"
        "    logits = model(torch.tensor([[5], [9]]), **hand_cache(cache), **options).logits\n"
        f"torch.save(logits, {str(tmp_path / 'logits.pt')!r})\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, capture_output=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


@pytest.mark.parametrize("family", ["gemma4_shared", "gemma3n"])
@torch.no_grad()
def test_the_queries_of_readers_are_evidence(family: str) -> None:
    """A layer that others read keeps other tokens than it would by its own queries alone."""
    model = build(family)
    ids, mask = prompts((61,))
    sets = []
    for scorer in ("snapkv(window=8, kernel=1)", "h2o(recent=4)"):
        for alone in (False, True):
            cache = kvtailor.cache_for(model, f"{scorer} @ tokens=20, slack=4")
            source, readers = next(iter(cache.geometry.readers.items()))
            assert readers
            if alone:
                act = cache.engine.act
                cache.engine.act = lambda state, query, visible, attended, others=(), act=act: act(
                    state, query, visible, attended
                )
            model(ids, attention_mask=mask, **hand_cache(cache))
            sets.append(held_columns(cache)[source])
    assert not torch.equal(sets[0], sets[1]) and not torch.equal(sets[2], sets[3])


@torch.no_grad()
def test_the_mass_of_a_shared_layer_is_that_of_all_who_read_it() -> None:
    """The attention that transformers' own eager form gives, of the layer and of its readers, summed up."""
    model, eager = build("gemma4_shared"), build("gemma4_shared", attention="eager")
    ids, mask = prompts((30,))
    cache = kvtailor.cache_for(model, "h2o(recent=4) @ tokens=100")
    model(ids, attention_mask=mask, **hand_cache(cache))
    source, readers = next(iter(cache.geometry.readers.items()))
    given = eager(ids, attention_mask=mask, output_attentions=True).attentions
    expected = sum(given[layer].sum(2) for layer in (source, *readers))
    state = cache.engine.states[cache.geometry.compressed.index(source)]
    heads = expected.unflatten(1, (state.heads, -1)).sum(2)
    found = torch.cat(state.observed.evidence.mass, 1).view(1, state.heads, -1)
    assert error(found, heads) < ROUNDING
    assert error(found, given[source].sum(2).unflatten(1, (state.heads, -1)).sum(2)) > 0.1
