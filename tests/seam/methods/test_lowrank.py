"""Low rank in whole models: padding, bytes, saving, eviction, and values that are never decoded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import dispatch
from kvtailor.types import Coordinates, Lift
from tests.seam.methods.test_codecs import check_rows_and_bytes, check_saved
from tests.support.calibrated import shipped_for
from tests.support.seam.zoo import ROUNDING, build, error, prompts

PLANS = (
    "lowrank(rank=0.5, heads=0, block_size=8)",
    "unrotated(of=lowrank(rank=0.5, heads=4, allocation=fisher, block_size=8))",
    "lowrank(rank=0.75, heads=2, of=hadamard(of=kivi(bits=8, group=8, recent=8)), only=values)",
    "kvplugin(rank=12, bits=8, only=values, block_size=8)",
    "orthogonal(rank=20, block_size=8)",
    "snapkv(window=6) + adakv + lowrank(rank=0.75, heads=0, block_size=8) @ tokens=24",
    "unrotated(of=kvtc(bits=5.0, group=8, recent=8, block_size=8))",
    "snapkv(window=6) + adakv + kvtc(bits=5.0, group=8, recent=0, block_size=8) @ tokens=24",
)
FAMILIES = ("llama", "gpt_neox")


@pytest.fixture(scope="module", autouse=True)
def _calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with shipped_for([build(family) for family in FAMILIES], tmp_path_factory.mktemp("calibrations")):
        yield


@pytest.mark.parametrize(("family", "plan"), [*(("llama", plan) for plan in PLANS), ("gpt_neox", PLANS[1])])
def test_batched_equals_solo_and_bytes_are_the_closed_form(family: str, plan: str) -> None:
    check_rows_and_bytes(family, plan, steps=12)


@pytest.mark.parametrize("plan", PLANS)
def test_a_saved_cache_goes_on_where_it_stopped(plan: str, tmp_path) -> None:
    check_saved(plan, tmp_path / "cache.safetensors", steps=6)


@pytest.mark.parametrize("plan", PLANS[:4])
@torch.no_grad()
def test_values_are_lifted_and_not_decoded(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits as with decoded values, and one lift for each layer and token."""
    model, ids = build("llama"), prompts((41,))[0]
    lifted: list[int] = []

    def count(where: object, name: str) -> None:
        map_sums = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *given, **how: lifted.append(1) or map_sums(*given, **how))

    # Beside decoded keys, in coordinates of their own by torch, and by the C++ kernels.
    for where, name in ((Lift, "of_sums"), (Coordinates, "of_sums"), (dispatch, "map_sums")):
        count(where, name)
    caches = [kvtailor.cache_for(model, f"{plan} + {attend}") for attend in ("segments", "reference")]
    for cache in caches:
        model(ids, **hand_cache(cache))
    assert not lifted, "a prompt is read before it is encoded"
    logits = [model(ids[:, :1], **hand_cache(cache)).logits for cache in caches]
    assert error(*logits) < ROUNDING and len(lifted) == 3


@torch.no_grad()
def test_bytes_at_several_lengths() -> None:
    """2 heads of 16 channels in float32: 12 coordinates in 8 bits, their scale, and the key, 81 bytes for each."""
    model = build("llama")
    for length in (40, 96, 203):
        cache = kvtailor.cache_for(model, "kvplugin(rank=12, bits=8, only=values)")
        model(prompts((length,))[0], **hand_cache(cache))
        ledger = cache.ledger()
        assert ledger.by_stage["encode"] == 3 * 2 * length * (64 + 12 + 4) and ledger.total == ledger.closed_form
