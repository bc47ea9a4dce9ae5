"""Our quantised cache against transformers' own `QuantizedCache`, at the same bits, groups and full-precision tail.

    pip install optimum-quanto hqq termcolor
    python -m kvtailor.bench.micro.builtins [--contexts 8192 32768] [--bits 4 2] [--backends quanto hqq] [--text FILE]

Three questions, everything in turns in this one process:

1. *What does a decoded token cost?* The random Llama-shaped model of `kvtailor.bench.micro.decode`, contexts written
   into the caches directly. The ratio is to `QuantizedCache`; `full` and `StaticCache`, which quantise nothing, stand
   beside.
2. *What does quantise-and-pack add to a prefill?* A prefill under our codec over one under `full`; processor time.
3. *What is lost?* The embedded model, windows of a text: a context is prefilled, then the continuation is fed in pieces
   of 32 tokens, so that `QuantizedCache` encodes its past again, as it does when it generates. Nats per token,
   paired over the windows.

A backend that is not installed is said and left out. Samples that other programs disturbed are left out and counted.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.data.texts import generated_text, read_text
from kvtailor.bench.measure.machine import describe
from kvtailor.bench.measure.statistics import Estimate, mean_difference, spread
from kvtailor.bench.micro.decode import Measured, interleaved, random_llama, report
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.loading import load
from kvtailor.hf.run.stock import fill, quantized_cache, static_cache

__all__ = ["decode", "lost", "main", "packing"]

_GROUP, _TAIL, _PIECE = 64, 128, 32


def _ours(bits: int) -> str:
    return f"kivi(bits={bits}, group={_GROUP}, recent={_TAIL})"


def _makers(backends: Sequence[str], bits: Sequence[int]) -> dict[str, Callable[[Any], Any]]:
    """By name, what makes each cache for a model."""
    made: dict[str, Callable[[Any], Any]] = {}
    for b in bits:
        made[_ours(b)] = partial(cache_for, plan=_ours(b))
        for backend in backends:
            make = partial(quantized_cache, backend=backend, bits=b, group=_GROUP, tail=_TAIL)
            made[f"QuantizedCache {backend} {b} bits"] = make
    return made


@torch.no_grad()
def decode(
    dtype: torch.dtype, context: int, rounds: int, backends: Sequence[str], bits: Sequence[int]
) -> list[Measured]:
    """Seconds of one decoded token after `context` tokens, for each cache."""
    ours, stock = random_llama(dtype, 2 * context), random_llama(dtype, 2 * context)
    generator = torch.Generator().manual_seed(1)
    shape = (1, 8, context, 128)
    states = [
        (torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype))
        for _ in range(4)
    ]
    token = torch.tensor([[7]])
    makers: dict[str, Callable[[Any], Any]] = {
        "StaticCache + sdpa": lambda model: static_cache(model, context + 2 * rounds + 16),
        "full": lambda model: cache_for(model, "full"),
        **_makers(backends, bits),
    }
    work: list[tuple[Measured, Callable[[], object]]] = []
    for name, make in makers.items():
        on = stock if "Cache" in name else ours
        cache = make(on)
        fill(cache, states)
        if "kivi" in name:
            # Two tokens more than one, so that what was written is encoded as after a prompt.
            on(token.repeat(1, 2), past_key_values=cache, logits_to_keep=1)
        held = None if "Cache" in name else cache.ledger().total
        work.append((Measured(name, cache_bytes=held), partial(on, token, past_key_values=cache)))
    interleaved(work, rounds, warmup=2)
    return [measured for measured, _ in work]


@torch.no_grad()
def packing(dtype: torch.dtype, context: int, rounds: int, bits: Sequence[int]) -> dict[str, list[float]]:
    """For each of our codecs the processor time of its prefill over that of `full`, one ratio for each round."""
    model = random_llama(dtype, 2 * context)
    ids = torch.randint(0, 512, (1, context), generator=torch.Generator().manual_seed(2))
    plans = ["full", *(_ours(b) for b in bits)]
    found: dict[str, list[float]] = {plan: [] for plan in plans[1:]}
    for round_ in range(rounds + 1):
        took = {}
        for plan in plans:
            begin = time.process_time()
            model(ids, past_key_values=cache_for(model, plan), logits_to_keep=1)
            took[plan] = time.process_time() - begin
        for plan in plans[1:]:
            if round_:
                found[plan].append(took[plan] / took["full"])
    return found


@torch.no_grad()
def lost(
    text: str, context: int, continuation: int, windows: int, backends: Sequence[str], bits: Sequence[int]
) -> dict[str, list[float]]:
    """Mean nats per token of each window's continuation, for each cache and `full`.

    Raises:
        KvtailorError: the text has too few tokens.
    """
    ours, tokenizer = load("demo", dtype=torch.float32)
    stock, _ = load("demo", dtype=torch.float32)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    size = context + continuation
    if len(ids) < windows * size:
        raise KvtailorError(f"{windows} windows of {size} tokens were asked for, and the text has {len(ids)} tokens")
    makers = {"full": lambda model: cache_for(model, "full"), **_makers(backends, bits)}
    found: dict[str, list[float]] = {name: [] for name in makers}
    for window in ids[: windows * size].view(windows, 1, size):
        for name, make in makers.items():
            model = stock if "Cache" in name else ours
            cache = make(model)
            logits = [model(window[:, :context], past_key_values=cache, logits_to_keep=1).logits]
            for first in range(context, size - 1, _PIECE):
                piece = window[:, first : min(first + _PIECE, size - 1)]
                logits.append(model(piece, past_key_values=cache).logits)
            found[name].append(_nats(torch.cat(logits, 1)[0], window[0, context:]))
    return found


def _said(found: Estimate) -> str:
    interval = "too few windows" if found.low is None else f"{found.low:+.4f} to {found.high:+.4f}"
    return f"{found.value:+.4f} ({interval})"


def _nats(logits: Tensor, targets: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.double(), targets))


def _installed(backends: Sequence[str]) -> list[str]:
    found = []
    for backend in backends:
        try:
            quantized_cache(random_llama(torch.float32, 256), backend, bits=4, group=_GROUP, tail=_TAIL)
            found.append(backend)
        except ImportError as error:
            print(f"QuantizedCache with {backend} is left out: {str(error).strip().splitlines()[0]}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--contexts", nargs="*", type=int, default=[8192, 32768])
    parser.add_argument("--packing", nargs="*", type=int, default=[8192])
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 2], choices=[4, 2])
    parser.add_argument("--backends", nargs="*", default=["quanto", "hqq"], choices=["quanto", "hqq"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--packing-rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="a text file; without it a generated text")
    parser.add_argument("--windows", type=int, default=20, help="0: no quality")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--continuation", type=int, default=256)
    options = parser.parse_args(arguments)
    dtype, backends = getattr(torch, options.dtype), _installed(options.backends)
    tables: dict[str, Any] = {}
    for context in options.contexts:
        title = f"decode, {options.dtype}, {context} tokens of context"
        results = decode(dtype, context, options.rounds, backends, options.bits)
        for b in options.bits:
            for backend in backends:
                base = f"QuantizedCache {backend} {b} bits"
                mine = [m for m in results if m.name in ("StaticCache + sdpa", "full", base, _ours(b))]
                tables[f"decode {context} {backend} {b}"] = report(title, mine, base)
    for context in options.packing:
        for plan, ratios in packing(dtype, context, options.packing_rounds, options.bits).items():
            s = spread(ratios)
            assert s.median is not None
            print(f"\nprefill of {context} tokens under {plan}: {s.median:.3f} of full's processor time {ratios}")
            tables[f"packing {context} {plan}"] = ratios
    if options.windows:
        needed = options.windows * (options.context + options.continuation)
        text = generated_text(8 * needed) if options.text is None else read_text(options.text)
        nats = lost(text, options.context, options.continuation, options.windows, backends, options.bits)
        print(f"\nnats per token of {options.continuation} after {options.context} tokens, {options.windows} windows")
        for name, values in nats.items():
            own = mean_difference(values, nats["full"])
            print(f"  {name:34s} {sum(values) / len(values):.4f}  to full {_said(own)}")
        for b in options.bits:
            for backend in backends:
                gap = mean_difference(nats[_ours(b)], nats[f"QuantizedCache {backend} {b} bits"])
                print(f"  ours less {backend}, {b} bits: {_said(gap)}")
        tables["nats"] = nats
    sys.stdout.flush()
    print(json.dumps({"machine": describe(bandwidth=False), "tables": tables}))


if __name__ == "__main__":
    main()
