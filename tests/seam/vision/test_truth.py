"""Truth of eviction with images: logits are those of a full cache in which exactly the dropped tokens are masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.hf.versions import hand_cache
from tests.support.crossed import crossed
from tests.support.seam import vision
from tests.support.seam.vision import BIDIRECTIONAL, ROWS, build, prompt, turn_two
from tests.support.seam.vision_reference import VisionReference, next_token
from tests.support.seam.zoo import ROUNDING, error, held_columns

EVICTING = (
    "streaming @ tokens=20",
    "snapkv(window=8) @ tokens=20",
    "snapkv(window=8) + adakv @ tokens=20",
    "h2o(recent=6) @ tokens=18, slack=4",
    "snapkv(window=8) + dynamickv @ tokens=20",
)


@torch.no_grad()
@pytest.mark.parametrize(("family", "plan"), crossed(vision.FAMILIES, EVICTING, each=2))
def test_logits_equal_a_full_cache_with_the_dropped_tokens_masked(family: str, plan: str) -> None:
    """A padded batch with images, decoded tokens, and a second turn that has an image of its own."""
    model, reference = build(family), VisionReference(family)
    # Gemma 4 does not divide its logits by anything, and rounding in float32 shows.
    bound = 3e-5 if family == "gemma4" else 1e-5
    first, cache = prompt(family, ROWS), kvtailor.cache_for(model, plan)
    logits = model(**first.inputs(), **hand_cache(cache)).logits
    real, mask = first.mask.bool()[:, :, None], first.mask
    assert error(logits * real, reference.read(first.inputs(), {}) * real) < ROUNDING
    token, answer, images = logits[:, -1:].argmax(-1), [], 0
    for step in range(10):
        held = held_columns(cache)
        images += (
            sum(int((~columns & first.types.bool()[:, None]).sum()) for columns in held.values()) if not step else 0
        )
        given = next_token(family, model, token, mask)
        answer.append(token)
        mask = given["attention_mask"]
        logits = model(**given, **hand_cache(cache)).logits
        assert error(logits, reference.read(given, held)) < bound, f"at decoded token {step}"
        token = logits.argmax(-1)
    assert images > 0, "no image token was dropped, so this test has shown nothing"
    whole = turn_two(first, ROWS, torch.cat(answer, 1), (2, (2, 4), 5))
    given = new_inputs(family, model, first, whole, mask.shape[1])
    held = held_columns(cache)
    logits = model(**given, **hand_cache(cache)).logits
    assert error(logits, reference.read(given, held)) < bound, "at the second turn"


def new_inputs(family: str, model: Any, first: Any, whole: Any, seen: int) -> dict[str, Tensor]:
    """What follows `seen` columns of a conversation, at the positions that one forward would give it."""
    given = {**whole.text(), **whole.pixels(first)}
    given["input_ids"] = whole.ids[:, seen:]
    if family in vision.MROPE:
        grids = whole.pixels()["image_grid_thw"]
        places, _ = model.model.get_rope_index(
            whole.ids, mm_token_type_ids=whole.types, image_grid_thw=grids, attention_mask=whole.mask
        )
        given["position_ids"] = places[..., seen:]
        del given["mm_token_type_ids"]
    elif family == "paligemma":
        # Its forward takes the types of new tokens alone, and a second image is no prefix.
        del given["token_type_ids"]
    return given


@torch.no_grad()
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_the_reference_notices_what_is_attended(family: str) -> None:
    """The yardstick can fail: without image tokens, and without the mask in which they see each other."""
    first, token = prompt(family, ROWS), torch.full((3, 1), 50)
    text = build(family).config.get_text_config()
    shape = (3, text.num_key_value_heads, first.ids.shape[1])
    everything = {layer: torch.ones(shape, dtype=torch.bool) for layer in range(text.num_hidden_layers)}
    no_images = {layer: held & ~first.types.bool()[:, None] for layer, held in everything.items()}

    def logits(held: dict[int, Tensor], *without: str) -> Tensor:
        reference = VisionReference(family)
        reference.read({name: given for name, given in first.inputs().items() if name not in without}, {})
        return reference.read(next_token(family, reference.model, token, first.mask), held)

    expected = logits(everything)
    assert error(logits(no_images), expected) > 0.1
    if family in BIDIRECTIONAL:
        assert error(logits(everything, "token_type_ids", "mm_token_type_ids"), expected) > 0.1


@torch.no_grad()
@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_h2o_counts_the_attention_between_image_tokens(family: str) -> None:
    """Its kept sets are the largest column sums of the model's own probabilities, image masks included."""
    model, reference = build(family), VisionReference(family)
    first, cache = prompt(family, ROWS[:1]), kvtailor.cache_for(model, "h2o(recent=4) @ tokens=16")
    model(**first.inputs(), **hand_cache(cache))
    reference.read(first.inputs(), {})
    if family == "gemma4":
        # Its layer 5 reads the keys of layer 3, and what it attends to counts there.
        reference.given[3] = reference.given[5] = reference.given[3] + reference.given[5]
    for layer, held in held_columns(cache).items():
        # (b, q, t, n) of the model's own softmax, summed over queries and over the query heads of a kv head.
        mass = reference.given[layer].unflatten(1, (held.shape[1], -1)).sum((2, 3))
        mass[..., -4:] = torch.inf
        expected = torch.zeros_like(held).scatter_(2, mass.topk(16, -1).indices, True)
        assert torch.equal(held, expected), f"layer {layer}"
