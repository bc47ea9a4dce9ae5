"""Host memory as a tier. Without an accelerator only what does not need one: what is kept, and that a cpu refuses."""

from __future__ import annotations

import pytest
import torch
from tests.seam.test_modes import decoded
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.store.host import Host

PLANS = ("kivi(bits=4, group=8, recent=8)", "minicache(start=0.0, of=plain(block_size=8))", "plain(block_size=8)")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("host", ["host", "host(resident_layers=1)", "host(on_device_layers=1, policy=mru)"])
def test_logits_and_bytes_where_nobody_refuses(plan: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "refusal", lambda self, device: None)
    model = build("llama")
    ids, mask = prompts((48, 31))
    resident, _ = decoded(model, ids, mask, plan, steps=10)
    found, cache = decoded(model, ids, mask, f"{plan} + {host}", steps=10)
    assert torch.equal(found, resident)
    ledger = cache.ledger()
    assert ledger.total == ledger.closed_form and ledger.by_tier["host"] > 0 and cache.traffic().misses > 0


def test_a_model_on_the_cpu_is_refused_before_anything_runs() -> None:
    model = build("llama")
    with pytest.raises(PlanError, match="host: the model is on the cpu, whose memory is the host's.*use disk"):
        kvtailor.cache_for(model, "full + host")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_logits_on_an_accelerator() -> None:
    model = build("llama").cuda()
    ids, mask = (each.cuda() for each in prompts((48, 31)))
    for plan in PLANS:
        resident, _ = decoded(model, ids, mask, plan, steps=20)
        found, cache = decoded(model, ids, mask, f"{plan} + host(resident_layers=1)", steps=20)
        assert torch.equal(found, resident)
        assert cache.ledger().total == cache.ledger().closed_form
