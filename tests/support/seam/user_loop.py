"""A loop of a user's own over a cache, and the same loop over one with `graphs=True`."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.seam.zoo import VOCABULARY, build, prompts
from torch import Tensor

import kvtailor
from kvtailor.hf.versions import hand_cache

KIVI = "kivi(bits=4, group=16, recent=16)"


class Loop:
    """A loop of a user's own, that calls the model as `generate()` does."""

    def __init__(self, model, cache, lengths: tuple[int, ...] = (12, 9)):
        self.model, self.cache = model, cache
        ids, self.mask = prompts(lengths)
        self.following = torch.randint(3, VOCABULARY, (len(lengths), 40), generator=torch.Generator().manual_seed(2))
        self.at = 0
        self.logits = self.feed(ids)

    def feed(self, ids: Tensor, **told: Any) -> Tensor:
        new = self.cache.seen + ids.shape[1] - self.mask.shape[1]
        self.mask = torch.cat([self.mask, self.mask.new_ones((ids.shape[0], new))], 1)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"attention_mask": self.mask, "position_ids": positions, "use_cache": True, "logits_to_keep": 1, **told}
        given = {name: value for name, value in given.items() if value is not ...}
        return self.model(input_ids=ids, **hand_cache(self.cache), **given).logits[:, -1]

    def step(self, **told: Any) -> Tensor:
        token = self.following[:, self.at : self.at + 1]
        self.at += 1
        return self.feed(token, **told)


def loops(plan: str = KIVI, family: str = "llama", steps: int = 5) -> tuple[Loop, Loop]:
    """A plain loop and one whose cache replays, after so many tokens, of models that may be changed by themselves."""
    made = []
    for graphs in (False, True):
        model = build(family)
        loop = Loop(model, kvtailor.cache_for(model, plan, graphs=graphs))
        for _ in range(steps):
            loop.step()
        made.append(loop)
    assert not steps or made[1].cache.open_steps.done == steps
    return made[0], made[1]
