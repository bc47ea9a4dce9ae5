"""The null plan with images in the prompt: tokens and logits of the model's own cache, in every mode and over turns."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from tests.support.crossed import crossed
from tests.support.seam import vision
from tests.support.seam.vision import MROPE, ROWS, TEXT_ONLY, Prompt, build, prompt, turn_two
from tests.support.seam.zoo import ROUNDING, error

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beam": {"num_beams": 3},
    "several_sequences": {"do_sample": True, "num_return_sequences": 2},
}
# From this release on a model takes encoded images, in chunks or beside the grids of a whole conversation.
TAKES_ENCODED = "mm_encoder_outputs" in signature(transformers.Qwen2VLForConditionalGeneration.forward).parameters


def generated(model: Any, cache: Any, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(7)
    how = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **hand_cache(cache), **{**how, **TEXT_ONLY, **options})


def apart(found: Any, expected: Any) -> float:
    assert torch.equal(found.sequences, expected.sequences)
    return max(error(now, then) for now, then in zip(found.logits, expected.logits, strict=True))


def own_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config())


def inputs_of_turn_two(family: str, model: Any, before: Prompt, whole: Prompt) -> dict[str, Any]:
    """The whole conversation, and the images that are new."""
    given: dict[str, Any] = {**whole.text(), **whole.pixels(before)}
    if family in MROPE:
        # Positions need the grids of all images, and transformers would encode as many: the new ones come encoded.
        new = whole.pixels(before)
        given = {**whole.text(), "image_grid_thw": whole.pixels()["image_grid_thw"]}
        if new:
            found = model.model.get_image_features(new["pixel_values"], new["image_grid_thw"], return_dict=True)
            given["mm_encoder_outputs"] = {"image": found}
    return given


@pytest.mark.parametrize(("family", "mode"), crossed(vision.FAMILIES, list(MODES)))
def test_full_equals_the_models_own_cache(family: str, mode: str) -> None:
    own, ours, given = build(family), build(family), prompt(family, ROWS).inputs()
    expected = generated(own, own_cache(own), given, **MODES[mode])
    assert apart(generated(ours, kvtailor.cache_for(ours, "full"), given, **MODES[mode]), expected) < ROUNDING


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_padded_batch_equals_solo(family: str) -> None:
    model, batch = build(family), prompt(family, ROWS)
    together = generated(model, kvtailor.cache_for(model, "full"), batch.inputs())
    plan = "snapkv(window=8) + adakv @ tokens=20"
    evicted = generated(model, kvtailor.cache_for(model, plan), batch.inputs())
    for row in range(len(ROWS)):
        for name, found in (("full", together), (plan, evicted)):
            solo = generated(model, kvtailor.cache_for(model, name), batch.row(row).inputs())
            for alone, each in zip(solo.logits, found.logits, strict=True):
                assert error(alone, each[row : row + 1]) < ROUNDING
    # A plan that drops nothing would show nothing.
    assert error(evicted.logits[-1], together.logits[-1]) > 1e-3


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_images_in_chunks(family: str) -> None:
    if not TAKES_ENCODED:
        pytest.skip(f"transformers {transformers.__version__} cannot read images in chunks")
    own, ours, given = build(family), build(family), prompt(family, ROWS[:1]).inputs()
    expected = generated(own, own_cache(own), given, prefill_chunk_size=16)
    found = generated(ours, kvtailor.cache_for(ours, "full"), given, prefill_chunk_size=16)
    assert apart(found, expected) < ROUNDING


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_prompt_lookup_with_images(family: str) -> None:
    own, ours, given = build(family), build(family), prompt(family, ROWS[:1]).inputs()
    expected = generated(own, own_cache(own), given, max_new_tokens=20)
    cache = kvtailor.cache_for(ours, "full")
    if family == "gemma4":
        with pytest.raises(CacheMisuse, match="layers of this gemma4_text read the keys of others"):
            generated(ours, cache, given, max_new_tokens=20, prompt_lookup_num_tokens=3)
        return
    found = generated(ours, cache, given, max_new_tokens=20, prompt_lookup_num_tokens=3)
    # transformers' own loop puts the first draft into PaliGemma's prefix, whose tokens see each other; ours does not.
    assert apart(found, expected) < ROUNDING


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("more", [(7,), (2, (2, 4), 5)], ids=["text", "image"])
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_second_turn(family: str, more: tuple[Any, ...], rows: int) -> None:
    """It equals the model's own cache, and the whole conversation in one forward; another one between does nothing."""
    own, ours = build(family), build(family)
    first = prompt(family, ROWS[:rows])
    if len(more) > 1 and family in MROPE and not TAKES_ENCODED:
        pytest.skip(f"transformers {transformers.__version__} cannot go on with an image")

    def turns(model: Any, cache: Any, *, between: bool) -> tuple[Prompt, Any]:
        answer = generated(model, cache, first.inputs()).sequences[:, first.ids.shape[1] :]
        whole = turn_two(first, ROWS[:rows], answer, more)
        if between:
            generated(model, None, prompt(family, [(3, (2, 5), 7)], state=4).inputs())
        with torch.no_grad():
            return whole, generated(model, cache, inputs_of_turn_two(family, model, first, whole))

    whole, expected = turns(own, own_cache(own), between=False)
    _, found = turns(ours, kvtailor.cache_for(ours, "full"), between=True)
    assert apart(found, expected) < ROUNDING
    if TAKES_ENCODED or len(more) == 1:
        # Before, Gemma 3 masks an image of a later turn in its windows otherwise than in one forward.
        assert apart(found, generated(own, None, whole.inputs())) < ROUNDING


@torch.no_grad()
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_prefill_reads_images_for_several_questions(family: str) -> None:
    own, ours = build(family), build(family)
    context = prompt(family, ROWS[:1])
    given = context.inputs()
    cache = kvtailor.prefill(ours, given.pop("input_ids"), given.pop("attention_mask"), plan="full", **given)
    for question in ((5,), (9,)):
        whole = turn_two(context, ROWS[:1], torch.zeros((1, 0), dtype=torch.int64), question)
        found = generated(ours, copy.deepcopy(cache), inputs_of_turn_two(family, ours, context, whole))
        assert apart(found, generated(own, None, whole.inputs())) < ROUNDING


@torch.no_grad()
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_prefill_of_a_padded_batch(family: str) -> None:
    own, ours = build(family), build(family)
    context = prompt(family, ROWS)
    given = context.inputs()
    cache = kvtailor.prefill(ours, given.pop("input_ids"), given.pop("attention_mask"), plan="full", **given)
    text = torch.randint(vision.FIRST_TEXT, vision.VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(2))
    # kvtailor reads the text that follows, and generate() what follows it.
    whole = turn_two(context, ROWS, text, (6,))
    mask = torch.cat([context.mask, torch.ones_like(text)], 1)
    kvtailor.prefill(ours, text, mask, cache=cache)
    found = generated(ours, cache, inputs_of_turn_two(family, ours, context, whole))
    assert apart(found, generated(own, None, whole.inputs())) < ROUNDING
