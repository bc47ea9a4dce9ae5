"""The shift of positions behind images belongs to a conversation: turns, copies, rows, and what cannot be known."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.versions import hand_cache
from tests.seam.vision.test_identity import apart, generated, inputs_of_turn_two
from tests.support.seam.vision import MROPE, ROWS, build, prompt, turn_two
from tests.support.seam.zoo import ROUNDING, error

NEW = torch.tensor([[9]])


@torch.no_grad()
@pytest.mark.parametrize("family", MROPE)
def test_two_conversations_on_one_model(family: str) -> None:
    """Forwards in turn; transformers' own caches share one shift, and the first of them would go on at the second's."""
    model, own, batch = build(family), build(family), prompt(family, ROWS)
    caches = [kvtailor.cache_for(model, "full") for _ in ROWS]
    for row, cache in enumerate(caches):
        model(**batch.row(row).inputs(), **hand_cache(cache))
    for _ in range(2):
        for cache in caches:
            found = model(NEW, **hand_cache(cache)).logits
            row = caches.index(cache)
            answer = NEW.repeat(1, cache.seen - batch.row(row).ids.shape[1])
            # Items of a row are drawn by its number, so this row stands where it stood.
            rows = [ROWS[each] if each != row else (*ROWS[row], answer[0]) for each in range(len(ROWS))]
            whole = prompt(family, rows).row(row)
            assert error(found, own(**whole.inputs()).logits[:, -1:]) < ROUNDING


@torch.no_grad()
@pytest.mark.parametrize("family", MROPE)
def test_text_after_another_conversations_image(family: str) -> None:
    model, own = build(family), build(family)
    generated(model, None, prompt(family, ROWS[:1]).inputs())
    text = prompt(family, [(20,)])
    cache = kvtailor.cache_for(model, "full")
    model(text.ids, **hand_cache(cache))
    found = model(NEW, **hand_cache(cache)).logits
    assert error(found, own(torch.cat([text.ids, NEW], 1)).logits[:, -1:]) < ROUNDING


@pytest.mark.parametrize("family", MROPE)
def test_copies_reset_and_rows(family: str) -> None:
    model, own, batch = build(family), build(family), prompt(family, ROWS)
    given = batch.inputs()
    cache = kvtailor.prefill(model, given.pop("input_ids"), given.pop("attention_mask"), plan="full", **given)
    whole = turn_two(batch, ROWS, torch.zeros((3, 0), dtype=torch.int64), (6,))
    expected = generated(own, None, whole.inputs())
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(torch.tensor([2, 0]))
    alone = {"input_ids": whole.ids[[2, 0]], "attention_mask": whole.mask[[2, 0]]}
    found = generated(model, chosen, alone)
    assert max(error(a, b[[2, 0]]) for a, b in zip(found.logits, expected.logits, strict=True)) < ROUNDING
    # Beams of a context that was read before: each row of the cache three times.
    several = copy.deepcopy(cache)
    several.batch_repeat_interleave(3)
    beams = generated(model, several, {"input_ids": whole.ids, "attention_mask": whole.mask}, num_beams=3)
    assert apart(beams, generated(own, None, whole.inputs(), num_beams=3)) < ROUNDING
    cache.reset()
    assert apart(generated(model, cache, whole.inputs()), expected) < ROUNDING


@torch.no_grad()
def test_positions_by_hand_are_not_forgotten() -> None:
    """The cache cannot see them, so what it would have to guess it warns of, or lets the model compute."""
    model, own, first = build("qwen2_5_vl"), build("qwen2_5_vl"), prompt("qwen2_5_vl", ROWS[:1])
    grids = first.pixels()["image_grid_thw"]
    places, _ = model.model.get_rope_index(first.ids, mm_token_type_ids=first.types, image_grid_thw=grids)

    def by_hand() -> kvtailor.KvCache:
        cache = kvtailor.cache_for(model, "full")
        model(**first.inputs(), position_ids=places, **hand_cache(cache))
        return cache

    with pytest.warns(UserWarning, match="position_ids of the caller's"):
        model(NEW, **hand_cache(by_hand()))
    whole = turn_two(first, ROWS[:1], NEW, (6,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = generated(model, by_hand(), inputs_of_turn_two("qwen2_5_vl", model, first, whole))
    assert apart(found, generated(own, None, whole.inputs())) < ROUNDING
    # A later image at its own place, by hand: the text behind it is not guessed either.
    cache = kvtailor.cache_for(model, "full")
    model(**first.inputs(), **hand_cache(cache))
    longer = turn_two(first, ROWS[:1], NEW, (2, (2, 4), 5))
    everything = longer.pixels()["image_grid_thw"]
    later, _ = model.model.get_rope_index(longer.ids, mm_token_type_ids=longer.types, image_grid_thw=everything)
    seen = cache.seen
    new = {"input_ids": longer.ids[:, seen:], "position_ids": later[..., seen:], **longer.pixels(first)}
    assert error(model(**new, **hand_cache(cache)).logits, own(**longer.inputs()).logits[:, seen:]) < ROUNDING
    with pytest.warns(UserWarning, match="position_ids of the caller's"):
        model(NEW, **hand_cache(cache))


@torch.no_grad()
def test_a_later_image_without_positions_warns() -> None:
    """transformers counts its tokens as text there, as with its own cache."""
    model, first = build("qwen3_vl"), prompt("qwen3_vl", ROWS[:1])
    cache = kvtailor.cache_for(model, "full")
    model(**first.inputs(), **hand_cache(cache))
    whole = turn_two(first, ROWS[:1], NEW, (2, (2, 4), 5))
    new = {"input_ids": whole.ids[:, cache.seen :], "mm_token_type_ids": whole.types[:, cache.seen :]}
    with pytest.warns(UserWarning, match="transformers counts their tokens as text"):
        model(**new, **whole.pixels(first), **hand_cache(cache))


@torch.no_grad()
@pytest.mark.parametrize("plan", ["expected @ tokens=20", "position + rolling @ tokens=16, slack=3", "kvquant4"])
def test_plans_that_turn_by_columns_refuse_images(plan: str) -> None:
    model, first = build("qwen2_vl"), prompt("qwen2_vl", ROWS[:1])
    try:
        cache = kvtailor.cache_for(model, plan)
    except UnsupportedModel as error:
        pytest.skip(f"before transformers 5.23 such a plan is refused for this model altogether: {error}")
    with pytest.raises(CacheMisuse, match=r"position of three axes \(M-RoPE\)"):
        generated(model, kvtailor.cache_for(model, plan), first.inputs())
    with pytest.raises(CacheMisuse, match=r"position of three axes \(M-RoPE\)"):
        model(**first.inputs(), **hand_cache(cache))
    # Nothing was fed, and text is taken.
    assert cache.seen == 0
    generated(model, cache, prompt("qwen2_vl", [(20,)]).inputs())
    # Where an image token stands at one position, such a plan takes images.
    model = build("llava")
    generated(model, kvtailor.cache_for(model, plan), prompt("llava", ROWS[:1]).inputs())
