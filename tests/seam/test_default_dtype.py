"""torch's default dtype is the user's own: what a cache does never depends on it.

It is also of the whole process, and loading a model in 16 bits sets it for a while, in whatever thread that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import kvtailor
from kvtailor.hf.versions import hand_cache
from tests.support.calibrated import shipped_for
from tests.support.every_plan import every_plan, first_of_each_method
from tests.support.seam.zoo import build, prompts

# A model on the CPU has no host to go to.
PLANS = {name: plan for name, plan in every_plan().items() if not name.startswith("store: host")}
DEFAULT = {*first_of_each_method()} | {name for name in PLANS if name.startswith("preset: ")}


@pytest.fixture(scope="module", autouse=True)
def _calibrated(tmp_path_factory):
    with shipped_for([build("llama")], tmp_path_factory.mktemp("calibrations")):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def decoded(model, plan: str) -> torch.Tensor:
    """Logits of some tokens after a padded prompt, at once and one by one."""
    ids, mask = prompts((96, 61))
    cache = kvtailor.prefill(model, ids[:, :90], mask[:, :90], plan=plan)
    found = []
    with torch.no_grad():
        for first, last in ((90, 95), (95, 96)):
            columns = mask[:, :last]
            places = (columns.cumsum(-1) - 1).clamp(min=0)[:, first:]
            fed = {"attention_mask": columns, "position_ids": places, **hand_cache(cache)}
            found.append(model(ids[:, first:last], **fed).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in PLANS]
)
def test_a_default_dtype_changes_no_bit(name: str) -> None:
    model = build("llama")
    expected = decoded(model, PLANS[name])
    for dtype in (torch.float64, torch.bfloat16):
        with default_dtype(dtype):
            found = decoded(model, PLANS[name])
        assert torch.equal(found, expected), dtype
