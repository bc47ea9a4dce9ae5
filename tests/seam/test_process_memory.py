"""The process's own allocation falls as the ledger says.

One process loads torch, and each measurement is a fork of it: a process that has allocated nothing else, and whose high
water mark the kernel starts at what is resident.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvtailor
from kvtailor.hf.versions import hand_cache

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status"),
    # Some 15 s; the ledger is held against storages and the allocator in the default run.
    pytest.mark.long,
]

RESIDENT = {
    "full": 1.10,
    "snapkv + adakv @ keep=0.25": 0.30,
    "streaming @ tokens=256": 0.16,
    "snapkv + kivi(bits=4) @ keep=0.5": 0.20,
}
SQUARE = ("h2o @ tokens=256", "snapkv + adakv @ tokens=256")
CHUNKS: tuple[dict[str, int], ...] = ({}, {"chunk": 256})
TOKENS, PROMPT, CONTEXT = 2048, 4096, 3000


def model_of(**shape: int) -> Any:
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=8192, **shape)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def status(line: str) -> int:
    """Bytes that the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) * 1024 for each in lines if each.startswith(line))


def resident() -> int:
    """Without pages of files: a fork has those of the code that it has run."""
    gc.collect()
    # glibc keeps freed pages of its heap until they are trimmed; what it keeps belongs to no cache.
    ctypes.CDLL(None).malloc_trim(0)
    return status("RssAnon")


def high_water() -> int:
    return status("VmHWM")


def grown(plan: str) -> dict[str, int]:
    """Of a cache that was filled in four pieces: what it added to the process, and what the ledger says."""
    model = model_of(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
    )
    ids = torch.randint(0, 64, (1, TOKENS))
    warm = kvtailor.cache_for(model, plan)
    model(ids[:, : TOKENS // 4], **hand_cache(warm), logits_to_keep=1)
    del warm
    before = resident()
    cache = kvtailor.cache_for(model, plan)
    for chunk in ids.split(TOKENS // 4, 1):
        model(chunk, **hand_cache(cache), logits_to_keep=1)
    model(ids[:, :1], **hand_cache(cache))
    return {"grown": resident() - before, "total": cache.ledger().total, "full": cache.ledger().full}


def peak_of_a_prompt(plan: str) -> int:
    model = model_of(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
    )
    ids = torch.randint(0, 64, (1, PROMPT))
    model(ids[:, :256], **hand_cache(kvtailor.cache_for(model, plan)), logits_to_keep=1)
    before = high_water()
    model(ids, **hand_cache(kvtailor.cache_for(model, plan)), logits_to_keep=1)
    return high_water() - before


def peak_of_a_prefill(how: dict[str, int], tokens: int = CONTEXT) -> int:
    model = model_of(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    ids = torch.randint(0, 64, (1, tokens))
    kvtailor.prefill(model, ids[:, :400], plan="snapkv @ tokens=256", **how)
    before = high_water()
    kvtailor.prefill(model, ids, plan="snapkv @ tokens=256", **how)
    return high_water() - before


def say() -> None:
    """What every measurement found, each in a fork."""
    torch.set_num_threads(1)
    with torch.no_grad():
        peak_of_a_prefill({}, tokens=64)  # what is imported late is imported once
    works = [("grown", grown, plan) for plan in RESIDENT]
    works += [("square", peak_of_a_prompt, plan) for plan in SQUARE]
    works += [("chunks", peak_of_a_prefill, how) for how in CHUNKS]
    found: dict[str, list[Any]] = {"grown": [], "square": [], "chunks": []}
    for name, work, argument in works:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with torch.no_grad():
                    torch.manual_seed(0)
                    os.write(writer, json.dumps(work(argument)).encode())
                status = 0
            finally:
                sys.excepthook(*sys.exc_info()) if status else None
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as told:
            said = told.read()
        assert os.waitpid(child, 0)[1] == 0, f"{name} of {argument}"
        found[name].append(json.loads(said))
    print(json.dumps(found))


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Any]]:
    # Else glibc raises this threshold as large blocks are freed, and what lies in its heap depends on their order.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    code = "from tests.seam.test_process_memory import say; say()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_resident_memory_follows_the_ledger(measured: dict[str, list[Any]]) -> None:
    for (plan, most), found in zip(RESIDENT.items(), measured["grown"], strict=True):
        assert found["full"] == 4 * 2 * 4 * (TOKENS + 1) * 128 * 4
        assert found["total"] <= most * found["full"], plan
        # The allocator may keep some of what passed through it; 32 MiB of keys and values are far above that.
        assert abs(found["grown"] - found["total"]) < 2 * 2**20, (plan, found)


def test_scoring_a_prompt_never_holds_a_square_matrix(measured: dict[str, list[Any]]) -> None:
    """4096 x 4096 float32 is 64 MiB for one head, and there are eight."""
    for plan, peak in zip(SQUARE, measured["square"], strict=True):
        assert peak < 48 * 2**20, plan


def test_chunks_bound_the_peak_of_a_prefill(measured: dict[str, list[Any]]) -> None:
    """3000 tokens of two layers are 6 MiB of keys and values; their activations at once are far more."""
    at_once, chunked = (peak / 2**20 for peak in measured["chunks"])
    assert at_once > 30 and chunked < 10, measured["chunks"]
