"""Truth of eviction: the logits are those of a full cache in which exactly the dropped tokens are masked."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import registry
from kvtailor.plan.arguments import word_of
from tests.support.crossed import crossed
from tests.support.discover import sample_of
from tests.support.seam.zoo import COMPRESSIBLE, ROUNDING, MaskedReference, build, error, held_columns, prompts

EVICTING = (
    "streaming @ tokens=20",
    "snapkv(window=8) @ tokens=20",
    "snapkv(window=8) + adakv @ tokens=20",
    "snapkv(window=4) + adakv @ keep=0.4, slack=6",
    "h2o(recent=6) @ tokens=18, slack=4",
    "random + pooled @ tokens=16",
    "snapkv(window=8) + pyramid @ tokens=20",
)
SELECTING = (
    "snapkv(window=4) + chunks(size=4) @ tokens=20",
    "h2o(recent=4) + adakv + chunks(size=3) @ keep=0.4, slack=5",
    "knorm + threshold @ keep=1.0, slack=never",
    "tova + threshold(at=0.5) @ tokens=24, slack=6",
)
# Where a method's own settings are larger than these prompts.
SETTINGS = {"lagkv": "(sinks=2, lag=6)", "snapkv": "(window=8)", "h2o": "(recent=6)"}


def every_scorer() -> list[str]:
    """A plan for each scorer that is there, but for those that take a pass of their own."""
    found = {name: sample_of(registry.load("score", name)) for name in registry.methods("score")}
    return [
        f"{name}{SETTINGS[name]} @ keep=0.5" if name in SETTINGS else f"{word_of(scorer)} @ keep=0.5"
        for name, scorer in found.items()
        if not scorer.needs.reconstruction
    ]


@pytest.mark.parametrize(("family", "plan"), crossed(COMPRESSIBLE, EVICTING))
def test_logits_equal_a_full_cache_with_the_dropped_tokens_masked(family: str, plan: str) -> None:
    check(family, plan, steps=32)


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox", "gemma3"], [*every_scorer(), *SELECTING]))
def test_so_with_every_scorer_and_selector(family: str, plan: str) -> None:
    try:
        kvtailor.cache_for(build(family), plan)
    except KvtailorError as error:
        if "calibrat" in str(error):
            pytest.skip(f"not without a file of its own: {error}")
        raise
    check(family, plan, steps=12)


@torch.no_grad()
def check(family: str, plan: str, steps: int) -> None:
    """Prefill of a padded batch, then greedy decoding, against the masked reference at each step."""
    model, reference = build(family), MaskedReference(family)
    ids, mask = prompts((56, 43, 31))
    cache = kvtailor.cache_for(model, plan)
    options = {} if family == "opt" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    logits = model(ids, attention_mask=mask, **hand_cache(cache), **options).logits
    real = mask.bool()[:, :, None]
    assert error(logits * real, reference(ids, mask, {}) * real) < ROUNDING
    token = logits[:, -1:].argmax(-1)
    dropped = []
    for step in range(steps):
        held = held_columns(cache)
        dropped.append(sum(int((~columns & mask.bool()[:, None]).sum()) for columns in held.values()))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        options = {} if family == "opt" else {"position_ids": mask.sum(-1, keepdim=True) - 1}
        logits = model(token, attention_mask=mask, **hand_cache(cache), **options).logits
        assert error(logits, reference(token, mask, held)) < ROUNDING, f"at decoded token {step}"
        token = logits.argmax(-1)
    assert dropped[0] > 0, "the plan evicted nothing, so this test has shown nothing"


@torch.no_grad()
def test_the_reference_notices_another_kept_set() -> None:
    """The yardstick can fail: the kept sets of two heads swapped give other logits."""
    model, reference = build("llama"), MaskedReference("llama")
    ids, mask = prompts((56,))
    cache = kvtailor.cache_for(model, "snapkv(window=8) + adakv @ tokens=20")
    token = model(ids, attention_mask=mask, **hand_cache(cache)).logits[:, -1:].argmax(-1)
    reference(ids, mask, {})
    swapped = {layer: columns.flip(1) for layer, columns in held_columns(cache).items()}
    mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
    logits = model(token, attention_mask=mask, **hand_cache(cache)).logits
    assert error(logits, reference(token, mask, swapped)) > 1e-2
