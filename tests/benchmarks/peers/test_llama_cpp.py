"""llama.cpp itself, where it is installed: the same logits, the same bytes, and both measurements end to end."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import decode_times, llama_runner
from benchmarks.peers.decode_times import BASE, KINDS, prepare, timed
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.llama_runner import LlamaCache, LlamaModel, missing, rotated_rows
from benchmarks.peers.losses import OWN_BASE, agreement, compared_losses, losses, windows_of
from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.hf.run.stock import dynamic_cache, fill
from kvtailor.hf.versions import hand_cache

REASON = missing() or (None if find_spec("gguf") else "the package gguf is not installed")
needs_llama_cpp = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SHAPE = {
    **RANDOM_SHAPES["random-llama-gqa"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def model(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(write_gguf(subject.model, tmp_path_factory.mktemp("gguf") / "demo.gguf", torch.float32))


@pytest.fixture
def caches() -> Iterator[list[LlamaCache]]:
    made: list[LlamaCache] = []
    yield made
    for cache in made:
        cache.close()


def test_without_it_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_runner, "missing", lambda: "llama-cpp-python cannot be imported: see the page")
    with pytest.raises(KvtailorError, match="see the page"):
        LlamaModel(Path("x.gguf"))


def test_a_rotation_keeps_lengths_and_is_its_own_inverse() -> None:
    states = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    for of_keys in (True, False):
        turned = rotated_rows(states, of_keys=of_keys)
        assert torch.allclose(rotated_rows(turned, of_keys=of_keys), states, atol=1e-5)
        assert torch.allclose(turned.norm(dim=-1), states.norm(dim=-1), rtol=1e-5)
    wide = torch.eye(128)[:1]
    # A key of 128 channels is mixed over all of them, a value over blocks of 64.
    assert int((rotated_rows(wide, of_keys=True) != 0).sum()) == 128
    assert int((rotated_rows(wide, of_keys=False) != 0).sum()) == 64
    with pytest.raises(KvtailorError, match="96 channels"):
        rotated_rows(torch.zeros(1, 96), of_keys=True)


@needs_llama_cpp
def test_the_exported_model_is_the_same_model(subject: Subject, model: LlamaModel) -> None:
    ids = torch.randint(3, 5000, (150,), generator=torch.Generator().manual_seed(1))
    found = agreement(subject, model, ids)
    assert found["f32, flash attention off"] < 1e-3
    assert found["f16, flash attention on"] < 0.2


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", *KINDS[1:]])
@pytest.mark.parametrize("rotation", [True, False])
def test_rows_are_encoded_to_the_bytes_that_llama_cpp_writes(
    kind: str, rotation: bool, model: LlamaModel, caches: list[LlamaCache]
) -> None:
    """Of the first layer, whose keys and values no rounding of the cache has changed."""
    ids = torch.arange(40) + 7
    caches += [LlamaCache(model, "f32", 256, threads=1)]
    caches += [LlamaCache(model, kind, 256, threads=1, rotation=rotation)]
    plain, own = caches
    for cache in caches:
        cache.feed(ids)
    assert own.rotates == (rotation and kind in KINDS[1:])
    found, expected = own.converted(plain.state(), 64), own.state()
    assert torch.equal(found.keys[0].data, expected.keys[0].data)
    assert torch.equal(found.values[0].data, expected.values[0].data)
    # By the log it has room for 256 tokens; the log has hundredths of a MiB.
    assert abs(own.allocated_bytes - 256 * expected.row_bytes) <= 0.005 * 2**20 + 1
    assert expected.held_bytes == 40 * expected.row_bytes
    back = own.restored(expected, 64, plain.kind)
    exact = plain.kind.decode(plain.state().values[0].data)
    assert float((plain.kind.decode(back.values[0].data) - exact).norm() / exact.norm()) < 0.15


@needs_llama_cpp
@pytest.mark.parametrize("flash", [True, False])
def test_a_filled_cache_decodes_what_transformers_decodes(
    flash: bool, subject: Subject, model: LlamaModel, caches: list[LlamaCache]
) -> None:
    generator = torch.Generator().manual_seed(1)
    states = {
        layer: (torch.randn(1, 2, 60, 64, generator=generator), torch.randn(1, 2, 60, 64, generator=generator))
        for layer in range(6)
    }
    theirs, ids = dynamic_cache(subject.model), torch.tensor([9, 30, 12])
    fill(theirs, states)
    with torch.no_grad():
        expected = subject.model(ids[None], **hand_cache(theirs)).logits[0]
    caches += [LlamaCache(model, "f16", 128, threads=1, flash=flash)]
    caches[0].fill(states)
    assert caches[0].seen == 60 and caches[0].state().transposed != flash
    found = caches[0].feed(ids, logits="all")
    assert float((found - expected).norm() / expected.norm()) < 5e-3
    with pytest.raises(KvtailorError, match=r"layers \[0, 1\], but the cache has 6"):
        caches[0].fill({layer: states[layer] for layer in range(2)})
    with pytest.raises(KvtailorError, match="'most'"):
        caches[0].feed(ids, logits="most")


@needs_llama_cpp
def test_keys_are_brought_into_the_order_that_the_model_turns(
    model: LlamaModel, caches: list[LlamaCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A llama's neighbours are turned by llama.cpp, and halves of a qwen2, whose keys stay as transformers has them."""
    keys = torch.arange(64.0).expand(1, 2, 3, 64)
    rows = {}
    caches += [LlamaCache(model, "f32", 64, threads=1)]
    assert model.turns_neighbours
    for neighbours in (True, False):
        monkeypatch.setattr(model, "turns_neighbours", neighbours)
        caches[0].fill(dict.fromkeys(range(6), (keys, keys)))
        rows[neighbours] = caches[0].kind.decode(caches[0].state().keys[5].data)[2, 64:68].tolist()
    assert rows == {True: [0, 32, 1, 33], False: [0, 1, 2, 3]}


@needs_llama_cpp
def test_a_full_cache_is_an_error(model: LlamaModel, caches: list[LlamaCache]) -> None:
    caches += [LlamaCache(model, "f16", 256, threads=1)]
    with pytest.raises(KvtailorError, match="300 tokens after 0, but its cache has 256 cells"):
        caches[0].feed(torch.arange(300) + 5)
    caches[0].feed(torch.arange(256) + 5)
    with pytest.raises(KvtailorError, match="1 tokens after 256"):
        caches[0].step(7)
    caches[0].clear()
    with pytest.raises(KvtailorError, match="0 tokens after 0"):
        caches[0].feed(torch.zeros(0, dtype=torch.int64))


@needs_llama_cpp
def test_losses_are_paired_and_q8_0_loses_next_to_nothing(subject: Subject, tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text("".join(f"The {n} sheep of farm {i * n} went home. " for n in range(400)))
    windows = windows_of(subject, sorted(tmp_path.glob("*.txt")), context=96, continuation=32, each=3)
    found = {each.name: each for each in losses(subject, windows, tmp_path, plans=("full", "vector(bits=4)"))}
    differences = compared_losses(found, windows)
    assert OWN_BASE not in differences and "full" not in differences
    assert isinstance(differences["vector(bits=4)"], Estimate) and differences["llama.cpp q4_0"].count == 6
    assert abs(differences["llama.cpp q8_0, of the prompt alone"].value) < 0.02
    assert abs(sum(found["full"].nll) - sum(found[OWN_BASE].nll)) / 6 < 0.02
    # 6 layers, 2 heads of 64, keys and values: 24 rows of a token.
    assert found["llama.cpp q4_0"].token_bytes == 24 * 36 == found["vector(bits=4)"].token_bytes
    assert found["llama.cpp q8_0, of the prompt alone"].token_bytes == 24 * 68
    with pytest.raises(KvtailorError, match="0 windows"):
        list(losses(subject, [], tmp_path))


@needs_llama_cpp
def test_all_sides_decode_the_same_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(RANDOM_SHAPES, "random-llama-gqa", SHAPE)
    monkeypatch.setattr(decode_times, "_PAUSE", 0.0)
    ready = prepare(torch.float32, 320, samples=8, folder=tmp_path, weights=[torch.float32])
    try:
        said: list[str] = []
        found = {each.name: each for each in timed(ready, 2, 1, said.append)}
        assert said.count(BASE) == 4 and len(found) == len(ready.sides)
        held: dict[str, Any] = {name: each.cache_bytes for name, each in found.items()}
        # 337 tokens of 2 layers, 2 heads of 128, keys and values.
        assert held["llama.cpp f16"] == 337 * 8 * 128 * 2
        assert held["llama.cpp q4_0"] == 337 * 8 * 4 * 18
        assert held["DynamicCache + sdpa"] == 337 * 8 * 128 * 4
        assert ready.error[BASE] < 1e-5 > ready.error["full"]
        assert ready.error["llama.cpp f16"] < 5e-3 and ready.error["llama.cpp f16, no flash attention"] < 5e-3
        assert ready.error["llama.cpp q8_0"] < 2e-2
        assert "full, after one token" not in ready.error
    finally:
        ready.close()
