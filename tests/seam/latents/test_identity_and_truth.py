"""Models that cache latents: `full` is their own cache, and a compressed one a full cache with the dropped masked."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvtailor
from kvtailor.hf.versions import hand_cache
from tests.seam.methods.test_identity import MODES, generated
from tests.support.crossed import crossed
from tests.support.seam.latent_zoo import LATENT_FAMILIES, MIXED_FAMILIES, LatentReference, build_latent, own_bytes
from tests.support.seam.zoo import ROUNDING, error, held_columns, prompts

EVERY = (*LATENT_FAMILIES, *MIXED_FAMILIES)
# Of these every test is quick; the others are of `make test-all`.
FEW = ("deepseek_v2", "minicpm3", "longcat_flash")


def few(cases: Iterable[Any]) -> list[Any]:
    """Pairs of `crossed` that begin with a family; those of most families are long."""
    return [
        pytest.param(*case.values, marks=case.marks if case.values[0] in FEW else pytest.mark.long) for case in cases
    ]


EVICTING = (
    "streaming @ tokens=20",
    "snapkv(window=8) @ tokens=20",
    "snapkv(window=8) + adakv @ tokens=20",
    "snapkv(window=4) + adakv @ keep=0.4, slack=6",
    "h2o(recent=6) @ tokens=18, slack=4",
    "snapkv(window=8) + cake @ tokens=20",
    "dynamickv @ tokens=20",
    "tova @ tokens=20, slack=5",
)
CODECS = {
    "kivi(bits=4, group=4, recent=0)": 0.3,
    "vector(bits=8, block_size=8)": 0.02,
    "kivi(bits=8, group=4, recent=0)": 0.02,
    "vector(bits=4, block_size=8, symmetric=false)": 0.3,
    "fp8(group=8, block_size=8)": 0.1,
    "hadamard(of=vector(bits=8, block_size=8))": 0.02,
    "nuq(bits=4, group=8, block_size=8)": 0.3,
    "sides(keys=hadamard(of=vector(bits=8, block_size=8)), values=plain)": 0.02,
    "snapkv(window=6) + kivi(bits=4, group=4, recent=0) @ tokens=24": 0.3,
}


@pytest.mark.parametrize(("family", "mode"), few(crossed(EVERY, list(MODES))))
def test_full_equals_the_models_own_cache(family: str, mode: str) -> None:
    own, ours = build_latent(family), build_latent(family)
    ids, mask = prompts((40, 27, 33))
    theirs = DynamicCache(config=own.config)
    expected = generated(own, theirs, ids, mask, **MODES[mode])
    cache = kvtailor.cache_for(ours, "full")
    found = generated(ours, cache, ids, mask, **MODES[mode])
    assert torch.equal(found.sequences, expected.sequences)
    for now, then in zip(found.logits, expected.logits, strict=True):
        assert error(now, then) < ROUNDING
    assert cache.seen == ids.shape[1] + 11
    assert cache.ledger().full == own_bytes(theirs)


@pytest.mark.parametrize("family", few(map(pytest.param, EVERY)))
def test_turn_two_equals_one_shot(family: str) -> None:
    own, ours = build_latent(family), build_latent(family)
    ids, mask = prompts((30, 22))
    cache = kvtailor.cache_for(ours, "full")
    first = generated(ours, cache, ids, mask).sequences
    more = torch.cat([first, prompts((9, 9), state=5)[0]], 1)
    mask = torch.cat([mask, mask.new_ones(2, more.shape[1] - mask.shape[1])], 1)
    found, expected = generated(ours, cache, more, mask), generated(own, None, more, mask)
    assert torch.equal(found.sequences, expected.sequences)
    assert max(error(a, b) for a, b in zip(found.logits, expected.logits, strict=True)) < ROUNDING


@pytest.mark.parametrize(("family", "plan"), few(crossed(EVERY, EVICTING)))
@torch.no_grad()
def test_logits_equal_a_full_cache_with_the_dropped_tokens_masked(family: str, plan: str) -> None:
    model, reference = build_latent(family), LatentReference(family)
    ids, mask = prompts((56, 43, 31))
    cache = kvtailor.cache_for(model, plan)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits
    real = mask.bool()[:, :, None]
    assert error(logits * real, reference(ids, mask, {}) * real) < ROUNDING
    token, dropped = logits[:, -1:].argmax(-1), []
    for step in range(16):
        held = held_columns(cache)
        assert {columns.shape[1] for columns in held.values()} == {1}, "one kept set for each layer"
        dropped.append(sum(int((~columns & mask.bool()[:, None]).sum()) for columns in held.values()))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        logits = model(token, **hand_cache(cache), **options).logits
        assert error(logits, reference(token, mask, held)) < ROUNDING, f"at decoded token {step}"
        token = logits.argmax(-1)
    assert dropped[0] > 0, "the plan evicted nothing, so this test has shown nothing"


@pytest.mark.parametrize("family", few(map(pytest.param, EVERY)))
@torch.no_grad()
def test_the_reference_notices_what_is_wrong(family: str) -> None:
    """The yardstick can fail: other kept sets, all tokens, and another layer's set give other logits."""
    model, reference = build_latent(family), LatentReference(family)
    ids, mask = prompts((56, 43, 31))
    cache = kvtailor.cache_for(model, "snapkv(window=8) @ tokens=20")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    token = model(ids, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits[:, -1:].argmax(-1)
    reference(ids, mask, {})
    held, before = held_columns(cache), copy.deepcopy(reference.cache)
    mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
    due = reference(token, mask, held)
    first, second = cache.geometry.compressed[:2]
    for wrong in ({}, {**held, first: held[first].flip(0)}, {**held, second: held[first]}):
        reference.cache = copy.deepcopy(before)
        assert error(reference(token, mask, wrong), due) > 0.1


@pytest.mark.parametrize(("family", "plan"), few(crossed(EVERY, list(CODECS))))
@torch.no_grad()
def test_codes_are_read_as_the_models_own_cache_of_decoded_latents(family: str, plan: str) -> None:
    """After the prompt both go on with what was decoded: transformers' cache gets it in place of its latents."""
    model, reference = build_latent(family), LatentReference(family)
    ids, mask = prompts((56, 43))
    cache = kvtailor.cache_for(model, plan)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first = model(ids, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits
    real = mask.bool()[:, :, None]
    assert error(first * real, reference(ids, mask, {}) * real) < ROUNDING
    token, held = first[:, -1:].argmax(-1), held_columns(cache)
    changed = 0.0
    layers = [reference.cache.layers[index] for index in cache.geometry.compressed]
    for layer, state in zip(layers, cache.engine.states, strict=True):
        for part in state.stored.segments:
            filled = part.layout.filled(torch.device("cpu"))
            columns = part.layout.columns(torch.device("cpu")).expand(part.layout.lanes, -1)
            filled = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
            row = part.layout.owners(torch.device("cpu"))[:, None].expand_as(columns)[filled]
            for own, decoded in zip((layer.keys, layer.values), part.decode(), strict=True):
                true = own[row, 0, columns[filled]]
                changed = max(changed, float((decoded[filled] - true).norm() / true.norm()))
                own[row, 0, columns[filled]] = decoded[filled]
    assert 0 < changed < CODECS[plan], "nothing was encoded, or a codec gives back something else"
    mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    found = model(token, attention_mask=mask, **hand_cache(cache), position_ids=mask.sum(-1, keepdim=True) - 1).logits
    assert error(found, reference(token, mask, held)) < 1e-4


@pytest.mark.parametrize(
    ("family", "plan"),
    few(crossed(EVERY, ["full", "snapkv(window=6) @ tokens=24", "kivi(bits=4, group=4, recent=8)"])),
)
@torch.no_grad()
def test_a_padded_batch_of_three_equals_each_alone(family: str, plan: str) -> None:
    model, lengths = build_latent(family), (48, 31, 40)
    ids, mask = prompts(lengths)
    forced = prompts((6, 6, 6), state=3)[0]

    def decoded(ids, mask, forced):
        cache = kvtailor.cache_for(model, plan)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = [model(ids, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits[:, -1]]
        for step in range(6):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
            logits.append(model(forced[:, step : step + 1], **hand_cache(cache), **options).logits[:, -1])
        return torch.stack(logits, 1)

    together = decoded(ids, mask, forced)
    for row, length in enumerate(lengths):
        alone = decoded(ids[row : row + 1, -length:], mask[row : row + 1, -length:], forced[row : row + 1])
        assert error(together[row], alone[0]) < ROUNDING, f"row {row}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3"])
def test_16_bits(family: str, dtype: torch.dtype) -> None:
    """Beside float32, 16 bits of ours are as far off as 16 bits of the model's own."""
    ids, mask = prompts((33, 21))
    exact, own, ours = build_latent(family), build_latent(family, dtype=dtype), build_latent(family, dtype=dtype)
    with torch.no_grad():
        for parameter, rounded in zip(exact.parameters(), own.parameters(), strict=True):
            parameter.copy_(rounded.float())
    cache, theirs = kvtailor.cache_for(ours, "full"), DynamicCache(config=own.config)
    with torch.inference_mode():
        due = exact(ids, attention_mask=mask).logits[:, -1]
        for model, given in ((own, theirs), (ours, cache)):
            model(ids[:, :-1], attention_mask=mask[:, :-1], **hand_cache(given))
        expected = own(ids[:, -1:], attention_mask=mask, **hand_cache(theirs)).logits[:, -1]
        found = ours(ids[:, -1:], attention_mask=mask, **hand_cache(cache)).logits[:, -1]
    assert found.dtype == dtype
    assert error(found.float(), due) < 2 * error(expected.float(), due) + 4 * torch.finfo(dtype).eps
