"""A cache that was saved on one device goes on, on the same or on another one, exactly where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.ops.dispatch import using
from tests.seam.other_device.test_every_plan import BATCH, CASES
from tests.support.other_device.backend import move_model
from tests.support.other_device.decoding import decode, decoded
from tests.support.other_device.ready import device_and_calibrations
from tests.support.seam.zoo import ROUNDING, build, error, prompts

# Ragged heads, codes and what an attention carries along; and another tier.
DEFAULT = (
    "together: snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) + rolling @ tokens=24",
    "store: host(on_device_layers=1, resident_layers=1)",
)


@pytest.fixture(scope="module", autouse=True)
def _device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with device_and_calibrations(["llama"], tmp_path_factory.mktemp("calibrations")):
        yield


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.long) for case in CASES]
)
def test_a_saved_cache_goes_on_where_it_stopped(case: str, tmp_path: Path) -> None:
    """Saved on the device and on the CPU: one file, byte for byte. Loaded on another device and on the CPU."""
    plan, mask = CASES[case], prompts(BATCH)[1]
    with using("reference"):
        on_cpu = decoded(build("llama"), plan, BATCH, steps=4, save=tmp_path / "of the cpu")
        found = decoded(move_model(build("llama"), "gpu:0"), plan, BATCH, steps=4, save=tmp_path / "of the device")
        assert torch.equal(found.tokens, on_cpu.tokens)
        assert (tmp_path / "of the device").read_bytes() == (tmp_path / "of the cpu").read_bytes()
        ledgers = []
        for device in ("cpu", "gpu:1"):
            model = move_model(build("llama"), device)
            cache = kvtailor.load_cache(model, tmp_path / "of the device")
            tokens, logits, _ = decode(model, cache, mask.to(device), 4)
            assert torch.equal(tokens.cpu(), on_cpu.tokens)
            # Not bit for bit: a reloaded buffer has another stride, and with it another order of summation.
            assert error(logits.cpu(), on_cpu.logits) < ROUNDING
            ledgers.append(cache.ledger())
        assert ledgers[0] == ledgers[1]


def test_every_default_is_a_case() -> None:
    assert set(DEFAULT) <= set(CASES)
