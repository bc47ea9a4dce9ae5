"""What the host keeps of rocket's index says what the device says, whatever is done between two tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.attend import rocket
from kvtailor.hf.versions import hand_cache
from tests.support.crossed import crossed
from tests.support.seam.zoo import build, prompts

PLANS = ["rocket(tokens=16, expect=24)", "snapkv(window=4) + rocket(tokens=16, expect=24) @ tokens=48, slack=5"]


def answers(plan: str, way: str) -> list[Tensor]:
    """Logits of tokens, between which something is done with the cache."""
    model, (ids, _) = build("llama"), prompts((150,))
    torch.manual_seed(3)
    ids = ids.repeat(2, 1)
    ids[1] = ids[1].flip(0)
    cache = kvtailor.cache_for(model, plan)
    found = [model(ids, **hand_cache(cache)).logits[:, -1]]

    def tokens(count: int) -> None:
        for _ in range(count):
            found.append(model(torch.randint(0, 60, (2, 1)), **hand_cache(cache)).logits[:, -1])

    tokens(12)
    if way == "a turn":
        found.append(model(torch.randint(0, 60, (2, 9)), **hand_cache(cache)).logits[:, -1])
    elif way == "taken back":
        cache.activate_past_recording()
        model(torch.randint(0, 60, (2, 4)), **hand_cache(cache))
        cache.crop(-3)
    elif way == "an index taken back":
        # More than wait for chunks of their own: once the index is made anew, and the token that did so taken back.
        tokens(110)
        for _ in range(12):
            cache.activate_past_recording()
            model(torch.randint(0, 60, (2, 1)), **hand_cache(cache))
            cache.crop(-1)
            tokens(1)
    elif way == "other rows":
        cache.reorder_cache(torch.tensor([1, 1]))
    tokens(12)
    return found


@pytest.mark.parametrize(
    ("plan", "way"),
    [*crossed(PLANS, ["nothing", "a turn", "taken back", "other rows"]), (PLANS[0], "an index taken back")],
)
@torch.no_grad()
def test_it_is_as_if_the_device_had_been_asked(plan: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = []

    def counted(carry):
        answer = own(carry)
        known.append(answer is not None)
        return answer

    own = rocket.indexed_on_host
    monkeypatch.setattr(rocket, "indexed_on_host", counted)
    found = answers(plan, way)
    assert sum(known) > len(known) // 3
    monkeypatch.setattr(rocket, "indexed_on_host", lambda carry: None)
    assert all(torch.equal(*each) for each in zip(found, answers(plan, way), strict=True))
