"""What calibrated methods get on a model, and when a cache is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor import calibration_file
from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.calibration_file import CalibratedMethod, shipped
from kvtailor.errors import CalibrationError, PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.score.atskv import ATSKV
from kvtailor.score.by_keys.qfilters import QFilters
from kvtailor.score.position import Position
from kvtailor.types import Held
from tests.support.calibrated import filters_for, tiny, write_file
from tests.support.seam.zoo import ROUNDING, build, error, held_columns, prompts


@dataclass(frozen=True, kw_only=True)
class Listening(QFilters):
    """Remembers what it was given."""

    given: list[tuple[int, Tensor]] = field(default_factory=list, compare=False)

    def score(self, held: Held) -> Tensor:
        assert held.calibration is not None
        self.given.append((held.layer, held.calibration["filters"]))
        return super().score(held)


@dataclass(frozen=True, kw_only=True)
class Weighted(CalibratedMethod, Allocator):
    """Keeps everything, and remembers what it was given."""

    given: list[Tensor] = field(default_factory=list, compare=False)
    calibrates: ClassVar[str] = "qfilters"
    scope: ClassVar[str] = "prompt"

    def allocate(self, request: BudgetRequest) -> Tensor:
        assert request.calibration is not None
        self.given.append(request.calibration["filters"])
        return request.capacity

    @classmethod
    def example_calibration(cls, **sizes: object) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
@torch.no_grad()
def test_each_layer_gets_its_tensors_and_the_allocator_all(family: str, tmp_path: Path) -> None:
    model = build(family)
    tensors = filters_for(model)
    path = write_file(tmp_path / "f.safetensors", "qfilters", tensors, model)
    score, allocate = Listening(file=path), Weighted(file=path)
    cache = kvtailor.cache_for(model, Plan(score=score, allocate=allocate, keep=1.0))
    model(prompts((40, 23))[0], **hand_cache(cache))
    layers = len(cache.geometry.compressed)
    assert [layer for layer, _ in score.given] == list(range(layers)) and len(allocate.given) == 1
    assert all(torch.equal(given, tensors["filters"][layer]) for layer, given in score.given)
    assert torch.equal(allocate.given[0], tensors["filters"])
    assert {each.hash for each in cache.calibrations} == {score.calibration.hash}


@torch.no_grad()
def test_the_method_inside_another_gets_its_tensors(tmp_path: Path) -> None:
    model = build("llama")
    path = write_file(tmp_path / "f.safetensors", "qfilters", filters_for(model), model)
    cache = kvtailor.cache_for(model, f"critical(of=qfilters(file='{path}')) @ tokens=12")
    model(prompts((40,))[0], **hand_cache(cache))
    assert int(cache.held().max()) == 12


@torch.no_grad()
def test_the_kept_tokens_are_those_along_the_filters(tmp_path: Path) -> None:
    model = build("llama")
    tensors = filters_for(model)
    path = write_file(tmp_path / "f.safetensors", "qfilters", tensors, model)
    ids, full = prompts((40,))[0], kvtailor.cache_for(model, "full")
    model(ids, **hand_cache(full))
    cache = kvtailor.cache_for(model, f"qfilters(file='{path}') @ tokens=9")
    model(ids, **hand_cache(cache))
    for layer, (whole, cut) in enumerate(zip(full.engine.states, cache.engine.states, strict=True)):
        keys = whole.parts()[0].decode()[0]
        kept = cut.parts()[0].layout.positions
        for head in range(2):
            along = [float(key @ tensors["filters"][layer, head]) for key in keys[head]]
            best = sorted(range(40), key=lambda token: -along[token])[:9]
            assert kept[head].tolist() == sorted(best)


def test_another_model_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model, other = build("llama"), build("llama", state=1)
    path = write_file(tmp_path / "f.safetensors", "qfilters", filters_for(model), model)
    plan = f"qfilters(file='{path}') @ keep=0.5"
    weights = "qfilters: f.safetensors was made for m, and this llama has other weights"
    shapes = "made for m, of 3 layers with 2 kv heads of size 16, and this model has 3 with 4"
    unshipped = r"no file is named, and of those that are shipped \(for .*run `kvtailor"
    for refusal, kind, on, asked in (
        (weights, CalibrationError, other, plan),
        (shapes, PlanError, build("gpt_neox"), plan),
        (unshipped, CalibrationError, other, "qfilters @ keep=0.5"),
    ):
        with pytest.raises(kind, match=refusal):
            kvtailor.cache_for(on, asked)
    assert other.config._attn_implementation == "sdpa"
    kvtailor.cache_for(model, plan)


def test_two_files_for_one_tensor_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    paths = [
        write_file(tmp_path / f"{state}.safetensors", "qfilters", filters_for(model, state=state), model)
        for state in (0, 1)
    ]

    @dataclass(frozen=True, kw_only=True)
    class Both(Position):
        one: QFilters = field(default_factory=lambda: QFilters(file=paths[0]))
        other: QFilters = field(default_factory=lambda: QFilters(file=paths[1]))

    with pytest.raises(CalibrationError, match="'filters' from 0.safetensors and from 1.safetensors, which differ"):
        kvtailor.cache_for(model, Plan(score=Both(), keep=0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_weights_in_a_smaller_dtype_are_known(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build("llama")
    path = str(tmp_path / "f.safetensors")
    kvtailor.calibrate(tiny(), "qfilters", {"t": "some words of a text " * 40}, out=path, tokens=256, context=128)
    kvtailor.cache_for(model.to(dtype), f"qfilters(file='{path}') @ keep=0.5")


@torch.no_grad()
def test_a_shipped_file_is_found_by_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(calibration_file, "_HOME", tmp_path)
    for state, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        write_file(
            tmp_path / name / "qfilters.safetensors",
            "qfilters",
            filters_for(model, state=state),
            build("llama", state=state),
            model=name,
        )
    shipped.cache_clear()
    try:
        for state, name in enumerate(("one", "two")):
            cache = kvtailor.cache_for(build("llama", state=state), "qfilters @ keep=0.5")
            assert [each.model for each in cache.calibrations] == [name]
            assert torch.equal(
                cache.engine.states[1].model.calibration["filters"], filters_for(model, state)["filters"][1]
            )
        with pytest.raises(CalibrationError, match=r"shipped \(for one, two\)"):
            kvtailor.cache_for(build("llama", state=2), "qfilters @ keep=0.5")
    finally:
        shipped.cache_clear()


@torch.no_grad()
def test_a_saved_cache_goes_on_with_its_file_and_not_with_another(tmp_path: Path) -> None:
    model = build("llama")
    path = write_file(tmp_path / "f.safetensors", "qfilters", filters_for(model), model)
    cache = kvtailor.cache_for(model, f"qfilters(file='{path}') @ tokens=20, slack=4")
    token = model(prompts((40,))[0], **hand_cache(cache)).logits[:, -1:].argmax(-1)
    cache.save(tmp_path / "cache.safetensors")
    again = kvtailor.load_cache(model, tmp_path / "cache.safetensors")
    for _ in range(8):
        expected = model(token, **hand_cache(cache)).logits
        assert error(model(token, **hand_cache(again)).logits, expected) < ROUNDING
        token = expected.argmax(-1)
    assert torch.equal(cache.held(), again.held()) and int(cache.held().max()) < 26
    write_file(tmp_path / "f.safetensors", "qfilters", filters_for(model, state=1), model)
    with pytest.raises(kvtailor.KvtailorError, match="means something else now"):
        kvtailor.load_cache(model, tmp_path / "cache.safetensors")


@pytest.mark.parametrize("allocate", ["", " + pyramid", " + dynamickv", " + adakv"])
@torch.no_grad()
def test_what_was_said_of_evicted_tokens_is_forgotten(allocate: str, tmp_path: Path) -> None:
    """After each eviction a layer remembers the relevance of the tokens it holds alone, in 8 bytes each."""
    model = build("llama")
    geometry = kvtailor.cache_for(model, "full").geometry
    networks = ATSKV.example_calibration(
        layers=len(geometry.compressed), heads=2, group=2, size=16, generator=torch.Generator().manual_seed(0)
    )
    path = write_file(tmp_path / "f.safetensors", "atskv", networks, model)
    cache = kvtailor.cache_for(model, f"atskv(file='{path}', window=4){allocate} @ tokens=14, slack=3")
    ids, mask = prompts((40, 23))
    model(ids, attention_mask=mask, **hand_cache(cache))
    evictions = 0
    for _ in range(9):
        for state, held in zip(cache.engine.states, held_columns(cache).values(), strict=True):
            if state.clock.growth:
                continue
            evictions += 1
            assert state.observed.scored_columns.shape[-1] == int(held.sum(-1).max())
            for row in range(2):
                for head in range(2):
                    here = held[row, head].nonzero()[:, 0]
                    assert torch.equal(state.observed.scored_columns[row, head, : here.numel()].long(), here)
                    assert bool(state.observed.scored[row, head, : here.numel()].isfinite().all())
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        model(torch.full((2, 1), 7), attention_mask=mask, **hand_cache(cache))
    assert evictions >= 3 * len(cache.engine.states)
