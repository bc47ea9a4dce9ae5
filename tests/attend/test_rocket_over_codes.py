"""What Rocket reads of codes is moved as codes: the same tokens as where all that is held is decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.seam.zoo import build, prompts

import kvtailor
from benchmarks.pairs import codecs
from kvtailor.attend import rocket
from kvtailor.attend.rocket import Rocket
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.lanes.rows import moved
from kvtailor.plan import Plan

CODECS = codecs()
# Plain states, and states that heads share: the one is copied as it is, the other decoded as a whole.
UNMOVED = ("indexed", "orthogonal")
LENGTHS = (300, 163, 300)
# What is moved is read as codes, what is decoded was rounded to the cache's float32.
NEAR = 2e-3


def logits(plan: Plan, lengths: tuple[int, ...]) -> torch.Tensor:
    """Of 4 tokens after a prompt, and of one after a turn of several."""
    model, (ids, mask) = build("llama"), prompts(lengths)
    cache = kvtailor.cache_for(model, plan)
    found = []
    with torch.inference_mode():
        for step in [ids, *ids[:, :4].split(1, 1), ids[:, 9:14], ids[:, 2:3]]:
            if step is not ids:
                mask = torch.cat([mask, torch.ones_like(step)], 1)
            out = model(step, attention_mask=mask, **hand_cache(cache), use_cache=True).logits[:, -1]
            found.append(out)
    return torch.stack(found[1:])


@pytest.mark.parametrize("lengths", [(300,), LENGTHS], ids=["alone", "padded"])
@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_read_as_it_would_be_decoded(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, count = CODECS[name], 0

    def counted(*args: Any) -> Any:
        nonlocal count
        found = moved(*args)
        count += any(not part.plain for part, _ in found)
        return found

    monkeypatch.setattr(rocket, "moved", counted)
    try:
        plan = Plan(attend=Rocket(tokens=40, expect=8), encode=codec)
        ours = logits(plan, lengths)
    except KvtailorError as refusal:
        pytest.skip(str(refusal).splitlines()[0])
    monkeypatch.setattr(rocket, "_moves_codes", lambda *_: False)
    theirs = logits(plan, lengths)
    assert (ours - theirs).norm() <= NEAR * theirs.norm()
    assert (count > 0) == (name not in UNMOVED)


def test_ragged_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = "kivi(bits=4, recent=8, group=8)"
    plan = Plan.parse(f"snapkv(window=8) + adakv + rocket(tokens=40, expect=8) + {codec} @ tokens=120")
    ours = logits(plan, LENGTHS)
    monkeypatch.setattr(rocket, "_moves_codes", lambda *_: False)
    assert (ours - logits(plan, LENGTHS)).norm() <= NEAR * ours.norm()
