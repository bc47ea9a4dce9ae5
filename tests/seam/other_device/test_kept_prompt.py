"""A cache on another device that is filled from a kept prompt, and how often the host waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvtailor
from kvtailor.hf.run.kept_prompt import fill, keep
from kvtailor.hf.run.prefill import read
from kvtailor.plan import Plan
from kvtailor.types import Needs
from tests.support.other_device.backend import move_model, register
from tests.support.other_device.syncs import count_syncs
from tests.support.seam.same_cache import assert_same_cache
from tests.support.seam.zoo import build, prompts

PLANS = (
    "full",
    "snapkv(window=6) + adakv @ tokens=24",
    "h2o(recent=6) @ tokens=24",
    "snapkv(window=6) + kivi @ keep=0.5",
)


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    register()
    yield


@pytest.mark.parametrize("lengths", [(140,), (140, 90)])
@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_it_is_the_cache_that_reads_the_prompt_and_waits_no_oftener(plan: str, lengths: tuple[int, ...]) -> None:
    model = move_model(build("llama"), "gpu:0")
    ids, mask = prompts(lengths)
    ids, padding = ids.to("gpu:0"), None if bool(mask.all()) else mask.to("gpu:0")
    needs = Plan.parse(plan).needs | Needs(window=30, rows=20)
    kept = keep(model, ids, needs, padding)
    own, mine = (kvtailor.cache_for(model, plan) for _ in range(2))
    with count_syncs() as plainly:
        read(model, own, ids, padding)
    with count_syncs() as filled:
        fill(mine, kept)
    assert_same_cache(mine, own)
    assert filled.total <= plainly.total, filled.table()
