"""What a measured basis is worth on the demo model, with the files that come with the package."""

from __future__ import annotations

import torch

import kvtailor
from kvtailor.hf.model.loading import load
from kvtailor.hf.versions import hand_cache


@torch.no_grad()
def test_what_a_basis_is_worth_on_the_demo_model() -> None:
    """Full rank loses nothing; half of the directions lose less if they are calibrated, and most if they are random."""
    model, tokenizer = load("demo", dtype=torch.float32)
    text = "The river rises in the hills north of the town and flows south for forty miles before it meets the sea. "
    ids = torch.tensor([tokenizer(text * 3)["input_ids"]])
    exact = model(ids, **hand_cache(kvtailor.cache_for(model, "full"))).logits[:, 1:]
    lost = {}
    for plan in ("lowrank(rank=1.0)", "palu", "lowrank(heads=0, basis=random)", "kvplugin_v9"):
        cache = kvtailor.cache_for(model, plan)
        model(ids[:, :1], **hand_cache(cache))
        rest = [model(each, **hand_cache(cache)).logits for each in ids[:, 1:].split(12, 1)]
        found = torch.cat(rest, 1).log_softmax(-1)
        expected = exact.log_softmax(-1)
        lost[plan] = float((expected.exp() * (expected - found)).sum(-1).mean())
    assert abs(lost["lowrank(rank=1.0)"]) < 1e-5
    assert lost["palu"] < 0.5 * lost["lowrank(heads=0, basis=random)"]
    assert lost["kvplugin_v9"] < lost["lowrank(heads=0, basis=random)"]
