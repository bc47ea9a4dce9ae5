"""Times a decoded token of a model that caches latents: transformers' own cache against plans of ours, in turns.

    python -m benchmarks.latents [tokens] [rounds] [dtype]

The attention is that of DeepSeek-V2-Lite (16 heads of 128 + 64, values of 128, latents of 512) in two layers whose
other parts are small, so that the cache is what a token costs. Each round decodes one token with every cache; medians
over the rounds are printed, their ratio to transformers' own, and the bytes that are held.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

import kvtailor
from kvtailor.hf.versions import hand_cache

PLANS = ("full", "snapkv @ keep=0.125", "vector(bits=8)")


def model_of(dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A random model of two layers."""
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        vocab_size=1000,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        head_dim=64,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=65536,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.inference_mode()
def main(tokens: int = 8192, rounds: int = 15, dtype: str = "float32") -> None:
    """Print a line for each cache."""
    model = model_of(getattr(torch, dtype))
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(1))
    caches = {"transformers' DynamicCache": DynamicCache(config=model.config)}
    caches |= {plan: kvtailor.cache_for(model, plan) for plan in PLANS}
    prefill = {}
    for name, cache in caches.items():
        started = time.perf_counter()
        # In pieces: torch's own kernel for keys and values of unequal sizes holds a whole n x n matrix on the CPU.
        step = 512 if name != "snapkv @ keep=0.125" else tokens
        for first in range(0, tokens, step):
            model(ids[:, first : first + step], **hand_cache(cache), logits_to_keep=1)
        prefill[name] = time.perf_counter() - started
    times: dict[str, list[float]] = {name: [] for name in caches}
    token = torch.tensor([[7]])
    for turn in range(rounds + 2):
        for name, cache in caches.items():
            started = time.perf_counter()
            model(token, **hand_cache(cache))
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    own = statistics.median(times["transformers' DynamicCache"])
    print(f"{tokens} tokens, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    for name, cache in caches.items():
        middle = statistics.median(times[name])
        held = sum(each.keys.nbytes + each.values.nbytes for each in cache.layers) if name[0] == "t" else None
        total = held if held is not None else cache.ledger().total
        print(
            f"{name:28} {middle * 1000:9.2f} ms  {middle / own:6.3f} of it  {total / 2**20:7.2f} MiB held  "
            f"prefill {prefill[name]:6.2f} s"
        )


if __name__ == "__main__":
    tokens, rounds, dtype = [*sys.argv[1:], *("8192", "15", "float32")[len(sys.argv) - 1 :]]
    main(int(tokens), int(rounds), dtype)
