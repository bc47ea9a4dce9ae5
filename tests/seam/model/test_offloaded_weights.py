"""Models whose weights wait on the CPU or a disk (accelerate's offloading): plans read and compress as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload

import kvtailor
from kvtailor.hf.model.fingerprint import weight_fingerprint
from tests.support.calibrated import shipped_for
from tests.support.other_device.decoding import decoded
from tests.support.seam.zoo import build, prompts

LENGTHS = (90, 61)
# They read the output projection, the rotary embedding, a calibration, and nothing of the model.
PLANS = (
    "critical(of=snapkv(window=6)) @ tokens=24",
    "expected @ tokens=24, slack=4",
    "qfilters @ tokens=24",
    "unrotated(of=kivi(bits=4, group=8, recent=8))",
    "snapkv(window=6) + pooled @ tokens=24",
)


def offloaded(where: str, folder: Path) -> Any:
    """A model of which all weights are on the device "meta" between two forwards."""
    model = build("llama")
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    return model


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_do_what_they_do_with_weights_in_memory(plan: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "calibrations").mkdir()
    with shipped_for([build("llama")], tmp_path / "calibrations"):
        expected = decoded(build("llama"), plan, LENGTHS, steps=6)
        found = decoded(offloaded(where, tmp_path / "weights"), plan, LENGTHS, steps=6)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.logits, expected.logits)
    assert all(torch.equal(found.held[layer], columns) for layer, columns in expected.held.items())
    assert found.ledger == expected.ledger


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_fingerprints_are_those_of_the_weights(where: str, tmp_path: Path) -> None:
    model = offloaded(where, tmp_path)
    assert weight_fingerprint(model) == weight_fingerprint(build("llama")) is not None
    assert weight_fingerprint(model) == weight_fingerprint(build("llama"))
    other = build("llama", state=3)
    cpu_offload(other, execution_device=torch.device("cpu"))
    assert weight_fingerprint(other) != weight_fingerprint(model)


def test_a_saved_cache_is_for_the_same_weights_alone(tmp_path: Path) -> None:
    ids, mask = prompts(LENGTHS)
    cache = kvtailor.prefill(offloaded("cpu", tmp_path), ids, mask, plan="streaming @ tokens=24")
    cache.save(tmp_path / "cache")
    assert kvtailor.load_cache(build("llama"), tmp_path / "cache").seen == max(LENGTHS)
    with pytest.raises(kvtailor.KvtailorError, match="fingerprint"):
        kvtailor.load_cache(build("llama", state=3), tmp_path / "cache")
