"""Images where kvtailor reads text alone, and images without their pixels: each in a sentence, before any work."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse, UnknownName
from kvtailor.hf.versions import hand_cache
from tests.support.seam.vision import FAMILIES, IMAGE, ROWS, build, prompt

EVICTING = "snapkv(window=8) @ tokens=20"


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_without_pixels(family: str) -> None:
    model, first = build(family), prompt(family, ROWS[:1])
    count = int((first.ids == IMAGE).sum())
    with pytest.raises(CacheMisuse, match=rf"prefill got {count} image tokens \(id 3\)"):
        kvtailor.prefill(model, first.ids, plan=EVICTING)
    with pytest.raises(CacheMisuse, match=rf"kvtailor.generate got {count} image tokens"):
        kvtailor.generate(model, first.ids, plan=EVICTING)
    with pytest.raises(CacheMisuse, match="kvtailor.generate reads text alone, and got .*: call model.generate"):
        kvtailor.generate(model, **first.inputs(), plan=EVICTING)
    text = prompt(family, [(20,)])
    if family == "paligemma":
        # Without token types transformers' own forms of attention do not agree on what this model reads.
        with pytest.raises(CacheMisuse, match="pass token_type_ids"):
            kvtailor.generate(model, text.ids, plan=EVICTING, max_new_tokens=3)
        return
    assert kvtailor.generate(model, text.ids, plan=EVICTING, max_new_tokens=3).sequences.shape == (1, 24)


def test_unknown_names_are_refused() -> None:
    model, text = build("llava"), prompt("llava", [(20,)])
    with pytest.raises(UnknownName, match="did you mean 'max_new_tokens'"):
        kvtailor.generate(model, text.ids, max_new_token=3)
    with pytest.raises(UnknownName, match="no input of LlavaForConditionalGeneration named 'pixel_value'"):
        kvtailor.prefill(model, text.ids, plan=EVICTING, pixel_value=torch.zeros(1))


def test_what_cannot_go_with_images() -> None:
    model, first = build("qwen2_vl"), prompt("qwen2_vl", ROWS[:1])
    given = first.inputs()
    with pytest.raises(CacheMisuse, match="asked for chunk=8 and for .*pixel_values"):
        kvtailor.prefill(model, plan=EVICTING, **given, chunk=8)
    with pytest.raises(CacheMisuse, match="reads its context twice by its token ids alone, and .*pixel_values"):
        kvtailor.prefill(model, plan="kvzip @ tokens=20", **given)
    with (
        kvtailor.session(model, "kvzip @ tokens=20") as session,
        pytest.raises(CacheMisuse, match="reads its context twice by its token ids alone"),
    ):
        session.generate(**given, max_new_tokens=3)
    cache = kvtailor.prefill(model, plan=EVICTING, **given)
    more = prompt("qwen2_vl", [((2, 2), 5)], state=3)
    with pytest.raises(CacheMisuse, match="the positions of an image among what follows"):
        kvtailor.prefill(model, more.ids, cache=cache, **more.pixels())
    assert cache.seen == first.ids.shape[1]


def test_a_session_takes_images() -> None:
    model, first = build("qwen3_vl"), prompt("qwen3_vl", ROWS)
    with kvtailor.session(model, EVICTING) as session:
        found = session.generate(**first.inputs(), max_new_tokens=4, do_sample=False)
        assert session.last is not None and bool((session.last.held() <= 23).all())
        cache = session.prefill(**first.inputs())
        assert bool((cache.held() == 20).all())
    expected = model.generate(
        **first.inputs(), **hand_cache(kvtailor.cache_for(model, EVICTING)), max_new_tokens=4, do_sample=False
    )
    assert torch.equal(found, expected)
