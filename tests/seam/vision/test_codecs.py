"""Encoded keys and values of image tokens: the logits are those of a full cache that holds what they decode to."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvtailor
from kvtailor.engine.view import view_held
from kvtailor.hf.mask import lazy_mask
from kvtailor.hf.versions import hand_cache, read_cache
from kvtailor.types import Needs
from tests.support.crossed import crossed
from tests.support.seam import vision
from tests.support.seam.vision import ROWS, build, prompt
from tests.support.seam.vision_reference import next_token
from tests.support.seam.zoo import ROUNDING, error

# Gemma 3 and 4 have windows of their own beside, which no codec touches.
FAMILIES = tuple(family for family in vision.FAMILIES if family not in ("gemma3", "gemma4"))
CODECS = ("kivi(bits=4, group=8, recent=8)", "vector(bits=8, block_size=8)")


@torch.no_grad()
@pytest.mark.parametrize(("family", "codec"), crossed(FAMILIES, CODECS, each=1))
def test_logits_equal_those_of_the_decoded_cache(family: str, codec: str) -> None:
    model, own, first = build(family), build(family), prompt(family, ROWS[:1])
    cache, whole = kvtailor.cache_for(model, codec), DynamicCache()
    model(**first.inputs(), **hand_cache(cache))
    exact = read_cache(own(**first.inputs(), **hand_cache(DynamicCache())))
    seen = first.ids.shape[1]
    changed = 0.0
    for layer, state in enumerate(cache.engine.states):
        held, _ = view_held(state, lazy_mask(1, seen, seen), Needs(), len(cache.engine.states))
        place = held.positions[..., None].expand_as(held.keys)
        keys, values = (torch.zeros_like(each).scatter_(2, place, each) for each in (held.keys, held.values))
        # The codec is lossy, and near.
        changed = max(changed, error(keys, exact.layers[layer].keys), error(values, exact.layers[layer].values))
        whole.update(keys, values, layer)
    assert 1e-4 < changed < (0.2 if codec.startswith("kivi") else 0.02)
    token = torch.full((1, 1), 50)
    given = next_token(family, model, token, first.mask)
    found = model(**given, **hand_cache(cache)).logits
    assert error(found, own(**given, **hand_cache(whole)).logits) < ROUNDING
