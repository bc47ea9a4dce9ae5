"""Is the house fast enough to live in? Decode and prefill of our cache against the best that transformers has.

    python -m kvtailor.bench.micro.decode [--dtype float32] [--contexts 8192 32768] [--threads 2] [--prefill 8192]

Three questions, each asked as a ratio of two things that ran in turns in this one process:

1. *Does our machinery cost anything?* One decoded token on `full`, our cache that drops nothing, over one on
   transformers' `StaticCache` with sdpa. That is the fastest stock set-up: it writes in place and folds grouped heads.
   `DynamicCache`, the default, copies the whole cache at every step; it is shown beside and never divided by.
2. *Does evicting pay?* The same for caches that hold an eighth: `snapkv` (every head the same number), and
   `snapkv + adakv` (every head its own number), which must not be slower than `snapkv` at the same number of tokens.
   Codes of 8 and 4 bits hold every token, and are read as they are stored. What no cache can save is beside it: `full`
   after a single token, which is the rest of the model.
3. *What does scoring cost?* A prefill under `snapkv` and under `h2o` over a prefill under `full`.

The model is random and Llama-shaped: 4 layers of 32 query and 8 kv heads of 128, hidden size 1024. Random weights say
nothing about quality, and nothing here is about quality. The context is written into the caches directly; where a plan
evicts, 64 real tokens follow it through the model, after which the plan cuts the cache as it does after a prompt.

What no decode step can beat is printed first: the bytes it must read, weights and cache, over the bandwidth of a plain
read measured here and now. Samples during which other processes took more than 15 % of a core are left out and
counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtailor.bench.measure.machine import Neighbours, describe, read_bandwidth
from kvtailor.bench.measure.statistics import spread
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.loading import new_model
from kvtailor.hf.run.stock import dynamic_cache, fill, static_cache

__all__ = ["Measured", "decode", "main", "prefill", "random_llama"]

_QUESTION = 64
_SMALLER = (
    "snapkv @ tokens={budget}",
    "snapkv + adakv @ tokens={budget}",
    "vector(bits=8)",
    "vector(bits=4)",
    "kivi(bits=4, group=64, recent=128)",
)


@dataclass
class Measured:
    """Times of one contestant.

    Attributes:
        name: contestant.
        seconds: undisturbed samples.
        disturbed: samples that were left out.
        cache_bytes: what the cache held; None where it was not read.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    disturbed: int = 0
    cache_bytes: int | None = None


def random_llama(dtype: torch.dtype, positions: int) -> Any:
    """The random Llama-shaped model of this bench."""
    torch.manual_seed(0)
    model = new_model(
        "llama", vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=positions,
    )  # fmt: skip
    return model.to(dtype).eval()


def interleaved(work: Sequence[tuple[Measured, Callable[[], object]]], rounds: int, warmup: int) -> None:
    """Runs every piece of work once in each round, in turns."""
    neighbours = Neighbours()
    for round_ in range(rounds + warmup):
        for measured, run in work:
            neighbours.start()
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            if round_ < warmup:
                continue
            if neighbours.disturbed():
                measured.disturbed += 1
            else:
                measured.seconds.append(seconds)


@torch.no_grad()
def decode(dtype: torch.dtype, context: int, rounds: int) -> list[Measured]:
    """Seconds of one decoded token after `context` tokens, for each cache."""
    model, stock = random_llama(dtype, 2 * context), random_llama(dtype, 2 * context)
    shape = (1, 8, context, 128)
    generator = torch.Generator().manual_seed(1)
    states = [
        (torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype))
        for _ in range(4)
    ]
    token = torch.tensor([[7]])
    work: list[tuple[Measured, Callable[[], object]]] = []

    def contestant(name: str, on: Any, cache: Any, cache_bytes: int | None = None) -> None:
        measured = Measured(name, cache_bytes=cache_bytes)
        work.append((measured, lambda: on(token, past_key_values=cache, use_cache=True)))

    static, dynamic = static_cache(stock, context + 2 * rounds + 16), dynamic_cache(stock)
    for cache in (static, dynamic):
        fill(cache, states)
    contestant("StaticCache + sdpa", stock, static)
    contestant("DynamicCache + sdpa", stock, dynamic)
    full = cache_for(model, "full")
    fill(full, states)
    contestant("full", model, full, full.ledger().total)
    ids = torch.randint(0, 512, (1, _QUESTION), generator=generator)
    for line in _SMALLER:
        plan = line.format(budget=context // 8)
        cache = cache_for(model, plan)
        fill(cache, states)
        model(ids, past_key_values=cache, logits_to_keep=1)
        model(token, past_key_values=cache)
        contestant(plan, model, cache, cache.ledger().total)
    del states
    empty = cache_for(model, "full")
    model(token, past_key_values=empty)
    contestant("full after one token", model, empty)
    interleaved(work, rounds, warmup=3)
    return [measured for measured, _ in work]


@torch.no_grad()
def prefill(dtype: torch.dtype, context: int, rounds: int) -> list[Measured]:
    """Seconds of one prefill of `context` tokens, for each plan."""
    model = random_llama(dtype, context)
    ids = torch.randint(0, 512, (1, context))
    work: list[tuple[Measured, Callable[[], object]]] = []
    for plan in ("full", f"snapkv @ tokens={context // 8}", f"h2o @ tokens={context // 8}"):

        def run(plan: str = plan) -> None:
            model(ids, past_key_values=cache_for(model, plan), logits_to_keep=1)

        work.append((Measured(plan), run))
    interleaved(work, rounds, warmup=1)
    return [measured for measured, _ in work]


def report(title: str, results: Sequence[Measured], base: str) -> list[dict[str, Any]]:
    """Prints a table and gives it as JSON values; ratios are of medians, to `base`."""
    print(f"\n{title}")
    reference = next(m for m in results if m.name == base)
    rows: list[dict[str, Any]] = []
    for measured in results:
        if not measured.seconds or not reference.seconds:
            print(f"  {measured.name:34s} no undisturbed sample ({measured.disturbed} left out)")
            rows.append({"name": measured.name, "median_ms": None, "ratio": None, "disturbed": measured.disturbed})
            continue
        s = spread(measured.seconds)
        middle = spread(reference.seconds).median
        assert s.median and s.q1 and s.q3 and middle
        ratio = s.median / middle
        print(
            f"  {measured.name:34s} {s.median * 1e3:9.2f} ms  [{s.q1 * 1e3:.2f}, {s.q3 * 1e3:.2f}]"
            f"  {ratio:5.2f} of {base}"
            f"  ({len(measured.seconds)} samples, {measured.disturbed} disturbed)"
        )
        rows.append(
            {
                "name": measured.name,
                "median_ms": s.median * 1e3,
                "ratio": ratio,
                "samples": len(measured.seconds),
                "disturbed": measured.disturbed,
                "cache_bytes": measured.cache_bytes,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--contexts", nargs="*", type=int, default=[8192, 32768])
    parser.add_argument("--prefill", nargs="*", type=int, default=[8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prefill-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    bandwidth = read_bandwidth()
    print(f"plain read here: {bandwidth / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    tables: dict[str, Any] = {}
    for name in options.dtype:
        dtype = getattr(torch, name)
        weights = sum(p.numel() for p in random_llama(dtype, 64).parameters()) * dtype.itemsize
        for context in options.contexts:
            cache = 4 * 2 * 8 * 128 * context * dtype.itemsize
            floor = (weights + cache) / bandwidth
            title = f"decode, {name}, {context} tokens of context (floor of a full cache: {floor * 1e3:.2f} ms)"
            tables[f"decode {name} {context}"] = report(
                title, decode(dtype, context, options.rounds), "StaticCache + sdpa"
            )
        for context in options.prefill:
            results = prefill(dtype, context, options.prefill_rounds)
            tables[f"prefill {name} {context}"] = report(f"prefill, {name}, {context} tokens", results, "full")
    sys.stdout.flush()
    print(json.dumps({"machine": describe(bandwidth=False), "read_bandwidth": bandwidth, "tables": tables}))


if __name__ == "__main__":
    main()
