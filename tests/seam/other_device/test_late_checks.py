"""Checks of a device's numbers are read together and late, and nothing that depends on a failed one is given out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.errors import CacheMisuse, MethodError
from kvtailor.hf.versions import hand_cache
from kvtailor.score.by_keys.knorm import KNorm
from kvtailor.select.topk import TopK
from kvtailor.types.late_checks import LateChecks, all_finite, read_flag, require_none, send
from tests.support.other_device.backend import move_model, register
from tests.support.other_device.syncs import count_syncs
from tests.support.seam.zoo import build, prompts
from tests.support.seam.zoo import error as error_of

PLAN = "knorm @ tokens=16, slack=0"


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    register()


def flag(value: bool, device: str = "gpu:0") -> Tensor:
    return torch.full((3,), value, device=device)


def failing(name: str) -> Callable[[], Exception]:
    return lambda: ValueError(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 63, 5), (2, 257)])
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    states = torch.randn(shape).to(dtype)
    assert bool(all_finite(states)) and bool(all_finite(states.transpose(0, -1)))
    for at in range(0, states.numel(), 1 + states.numel() // 50):
        for wrong in (torch.nan, torch.inf, -torch.inf):
            spoilt = states.clone()
            spoilt.view(-1)[at] = wrong
            assert not all_finite(spoilt)
    if states.numel():
        # The largest number there is, everywhere: its sum would be infinite.
        assert bool(all_finite(torch.full_like(states, torch.finfo(dtype).max)))


def test_on_the_cpu_a_check_is_made_where_it_stands() -> None:
    with LateChecks().collecting(), pytest.raises(ValueError, match="now"):
        require_none(flag(True, "cpu"), failing("now"))


def test_outside_of_a_cache_the_host_waits() -> None:
    with pytest.raises(ValueError, match="now"):
        require_none(flag(True), failing("now"))


def test_what_was_collected_is_read_once_and_the_first_that_failed_is_raised() -> None:
    late, told = LateChecks(), []
    with count_syncs() as found, late.collecting():
        for value, name in ((False, "none"), (True, "first"), (True, "second")):
            require_none(flag(value), failing(name))
    assert not found.total
    with count_syncs() as found, pytest.raises(ValueError, match="first"):
        late.settle(told.append)
    assert found.total == 1 and told == ["first"]
    late.settle()


def test_each_device_is_read_by_itself() -> None:
    late = LateChecks()
    with late.collecting():
        require_none(flag(False, "gpu:0"), failing("zero"))
        require_none(flag(True, "gpu:1"), failing("one"))
    with count_syncs() as found, pytest.raises(ValueError, match="one"):
        late.settle()
    assert found.total == 2


def test_another_number_brings_the_checks_along() -> None:
    late, other = LateChecks(), LateChecks()
    for each, value in ((late, True), (other, False)):
        with each.collecting():
            require_none(flag(value), failing("late"))
    again = copy.deepcopy(late)
    with count_syncs() as found:
        assert read_flag(flag(True)[0]) and not read_flag(flag(False)[0])
        other.settle()
    assert found.total == 2
    with count_syncs() as found, pytest.raises(ValueError, match="late"):
        late.settle()
    assert not found.total
    with pytest.raises(ValueError, match="late"):
        again.settle()


def test_what_is_forgotten_is_not_raised() -> None:
    late = LateChecks()
    with late.collecting():
        require_none(flag(True), failing("late"))
    late.forget()
    late.settle()


def test_sending_a_number_is_not_waited_for() -> None:
    numbers = torch.arange(4)
    with count_syncs() as found:
        there = send(numbers, torch.device("gpu:0"))
    assert not found.total and torch.equal(there.cpu(), numbers)


def broken_scores(method: KNorm, held: Any) -> Tensor:
    return torch.full(held.positions.shape, torch.nan, device=held.positions.device)


def too_many(method: TopK, scores: Tensor, budgets: Tensor) -> Tensor:
    return scores > -torch.inf


WRONG: dict[str, tuple[type, str, Any, type[Exception], str]] = {
    "scores": (KNorm, "score", broken_scores, CacheMisuse, "layer 0 of the compressed layers has no finite score"),
    "a kept set": (
        TopK,
        "select",
        too_many,
        MethodError,
        r"kept 17 tokens in \(row, head\) \(0, 0\), where 16 are due",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@torch.no_grad()
def test_a_decoded_token_that_went_wrong_ends_the_next_forward(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU its own forward ends with the same error. The outputs of that forward have no part in it."""
    kind, name, wrong, error, sentence = WRONG[what]
    ids = prompts((40,))[0]
    model = build("llama")
    expected = model(ids[:, :1], **hand_cache(kvtailor.prefill(model, ids, plan=PLAN))).logits
    for device in ("cpu", "gpu:0"):
        model = move_model(build("llama"), device)
        cache, token = kvtailor.prefill(model, ids.to(device), plan=PLAN), ids[:, :1].to(device)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, wrong)
            if device == "cpu":
                with pytest.raises(error, match=sentence):
                    model(token, **hand_cache(cache))
                continue
            assert error_of(model(token, **hand_cache(cache)).logits.cpu(), expected) < 1e-5
        with pytest.raises(error, match=sentence):
            model(token, **hand_cache(cache))
        with pytest.raises(CacheMisuse, match="start over|reset"):
            model(token, **hand_cache(cache))
        cache.reset()
        model(token, **hand_cache(cache))


@pytest.mark.parametrize("use", ["a saved file", "a choice of rows", "a prompt"])
@torch.no_grad()
def test_it_ends_every_other_use_too(use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model, ids = move_model(build("llama"), "gpu:0"), prompts((40,))[0].to("gpu:0")
    cache = kvtailor.prefill(model, ids, plan=PLAN)
    with monkeypatch.context() as patch:
        patch.setattr(KNorm, "score", broken_scores)
        if use == "a prompt":
            with pytest.raises(CacheMisuse, match="no finite score"):
                kvtailor.prefill(model, ids, plan=PLAN)
            return
        model(ids[:, :1], **hand_cache(cache))
    with pytest.raises(CacheMisuse, match="no finite score"):
        cache.save(tmp_path / "cache") if use == "a saved file" else cache.batch_repeat_interleave(2)
