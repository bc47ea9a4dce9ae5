"""The process's own allocation falls as the ledger says, each measured in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")

_CHILD = """
import ctypes, gc, json, os, sys
import torch, transformers
import kvtailor

def resident():
    gc.collect()
    # glibc keeps freed pages of its heap until asked; what it keeps is nobody's cache.
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=8192,
)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, 64, (1, 4096))
with torch.no_grad():
    warm = kvtailor.cache_for(model, sys.argv[1])
    model(ids[:, :1024], past_key_values=warm, logits_to_keep=1)
    del warm
    before = resident()
    cache = kvtailor.cache_for(model, sys.argv[1])
    for chunk in ids.split(1024, 1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    model(ids[:, :1], past_key_values=cache)
print(json.dumps({"grown": resident() - before, "total": cache.ledger().total, "full": cache.ledger().full}))
"""


@pytest.mark.parametrize(
    ("plan", "most"),
    [
        ("full", 1.10),
        ("snapkv + adakv @ keep=0.25", 0.30),
        ("streaming @ tokens=512", 0.16),
        ("snapkv + kivi(bits=4) @ keep=0.5", 0.20),
    ],
)
def test_resident_memory_follows_the_ledger(plan: str, most: float) -> None:
    # Else glibc raises this threshold as large blocks are freed, and what lies in its heap depends on their order.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _CHILD, plan]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["full"] == 4 * 2 * 4 * 4097 * 128 * 4
    assert found["total"] <= most * found["full"]
    # The allocator may keep a few MiB of what passed through it; 64 MiB of keys and values are far above that.
    assert abs(found["grown"] - found["total"]) < 8 * 2**20, found


_PEAK = """
import sys
import torch, transformers
import kvtailor

def high_water():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=8192,
)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, 64, (1, 8192))
with torch.no_grad():
    model(ids[:, :256], past_key_values=kvtailor.cache_for(model, sys.argv[1]), logits_to_keep=1)
    before = high_water()
    model(ids, past_key_values=kvtailor.cache_for(model, sys.argv[1]), logits_to_keep=1)
print(high_water() - before)
"""


@pytest.mark.parametrize("plan", ["h2o @ tokens=512", "snapkv + adakv @ tokens=512"])
def test_scoring_a_prompt_never_holds_a_square_matrix(plan: str) -> None:
    """8192 x 8192 float32 is 256 MiB for one head, and there are eight."""
    done = subprocess.run([sys.executable, "-c", _PEAK, plan], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128 * 2**20


_CHUNKED = """
import json, sys
import torch, transformers
import kvtailor

def high_water():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, 64, (1, 4000))
how = json.loads(sys.argv[1])
kvtailor.prefill(model, "snapkv @ tokens=256", ids[:, :400], **how)
before = high_water()
kvtailor.prefill(model, "snapkv @ tokens=256", ids, **how)
print(high_water() - before)
"""


def test_chunks_bound_the_peak_of_a_prefill() -> None:
    """4000 tokens of two layers are 8 MiB of keys and values; their activations at once are far more."""
    peaks = []
    for how in ({}, {"chunk": 256}):
        words = [sys.executable, "-c", _CHUNKED, json.dumps(how)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 2**20)
    at_once, chunked = peaks
    assert at_once > 40 and chunked < 10, peaks
