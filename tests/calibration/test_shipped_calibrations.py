"""The calibration files that come with the package: small, of the embedded models, and not of what is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor import calibration_file
from kvtailor.bench.checks import check_calibration
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.overlap import read_back
from kvtailor.bench.data.synthetic.documents import TASKS, make_document
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.subject import Subject
from kvtailor.calibration.contract import kinds
from kvtailor.calibration_file import Calibration, shipped
from kvtailor.errors import KvtailorError
from kvtailor.hf.model.embedded import NAMES
from kvtailor.hf.model.loading import load
from kvtailor.hf.versions import hand_cache

PLANS = {
    "qfilters": "qfilters @ tokens=24",
    "atskv": "atskv(window=8) @ tokens=24",
    "duo": "position + duo(streaming=8) @ tokens=24",
    "erank": "snapkv(window=8) + erank(static=true) @ tokens=24",
    "triattention": "triattention @ tokens=24",
    "lowrank": "snapkv(window=8) + lowrank @ tokens=24",
    "lukv": "expected(epsilon=0.02) + lukv @ tokens=24",
}
# A file of these is larger than all others together, and nothing is shipped that a user can train in a minute.
NOT_SHIPPED = {"kvzap", "fastkvzip", "expected", "kvtc", "static_fp8"}
every_file = pytest.mark.parametrize("made", shipped(), ids=lambda made: f"{made.model} {made.kind}")


def test_every_embedded_model_has_every_kind() -> None:
    assert set(PLANS) == set(kinds()) - NOT_SHIPPED
    assert {(each.model, each.kind) for each in shipped()} == {(model, kind) for model in NAMES for kind in PLANS}


@every_file
def test_it_is_small_and_says_where_it_comes_from(made: Calibration) -> None:
    assert Path(made.name).stem == made.kind and made.made["command"].startswith(f"kvtailor calibrate {made.kind} ")
    # Moments are of every pair of channels; everything else is of heads.
    assert sum(tensor.nbytes for tensor in made.tensors.values()) < (160_000 if made.kind == "lowrank" else 50_000)
    assert len(made.metadata["calibrated_on"]) < 200_000
    assert all(bool(tensor.isfinite().all()) for tensor in made.tensors.values())
    assert made.kind != "atskv" or made.facts["verdict"].startswith("beats its SnapKV feature on held-out text: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_model_finds_its_files_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    model, _ = load(name, dtype=dtype)
    ids = torch.randint(3, 5000, (1, 40), generator=torch.Generator().manual_seed(0))
    for kind, plan in PLANS.items():
        cache = kvtailor.cache_for(model, plan)
        assert [(each.kind, each.model) for each in cache.calibrations] == [(kind, name)]
        model(ids, **hand_cache(cache))
        assert cache.held().double().mean() == 24


@torch.no_grad()
def test_the_untrained_model_gets_random_numbers_and_says_so() -> None:
    subject = Subject.load("random-llama")
    ids = torch.randint(3, 5000, (1, 40), generator=torch.Generator().manual_seed(0))
    for kind, plan in PLANS.items():
        caches = [kvtailor.cache_for(subject.model, plan) for _ in range(2)]
        (one,), (other,) = (cache.calibrations for cache in caches)
        assert one.kind == kind and one.model == "random-llama" and one.hash == other.hash
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
        subject.model(ids, **hand_cache(caches[0]))
        assert caches[0].held().double().mean() == 24
        (said,) = subject.verdicts(Contestant.of(plan))
        assert said.startswith(f"{kind} of random-llama: random numbers") and not subject.provenance(
            Contestant.of(plan)
        )
    named = Path(calibration_file.__file__).parent / "calibration" / "shipped" / "demo" / "qfilters.safetensors"
    with pytest.raises(KvtailorError, match="was made for demo"):
        kvtailor.cache_for(subject.model, f"qfilters(file='{named}') @ tokens=24")


def test_none_was_made_from_what_the_bench_generates() -> None:
    documents = [
        make_document(kind, state=state, length=4000, depth=0.5).prompt for kind in TASKS for state in range(3)
    ]
    for made in shipped():
        if made.texts:
            check_calibration(read_back(made.metadata), [*documents, generated_text(100_000)], "generated documents")
