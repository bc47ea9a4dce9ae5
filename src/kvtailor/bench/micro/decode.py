"""Does our machinery cost anything, and does a smaller cache pay? A decoded token and a prefill, against transformers.

    kvtailor bench micro decode [--dtype float32] [--contexts 8192,32768] [--prefill 8192] [--threads 2] [--device cuda]

Three questions, each a ratio of two things that ran in turns in this one process:

1. *Does our machinery cost anything?* One decoded token on `full`, our cache that drops nothing, over one on
   transformers' `StaticCache` with sdpa. That is the fastest stock set-up: it writes in place and folds grouped heads.
   `DynamicCache`, the default, copies the whole cache at every step; it is shown beside and never divided by.
2. *Does evicting pay?* The same for caches that hold an eighth: `snapkv` (every head the same number), and
   `snapkv + adakv` (every head its own number), which must not be slower than `snapkv` at the same number of tokens.
   Codes of 8 and 4 bits hold every token, and are read as they are stored. What no cache can save is beside it: `full`
   after a single token, which is the rest of the model.
3. *What does scoring cost?* A prefill under `snapkv` and under `h2o` over a prefill under `full`.

The model is `random-llama-gqa`, untrained: 4 layers of 32 query and 8 kv heads of 128, hidden size 1024. The context is
written into the caches directly; where a plan evicts, 64 real tokens follow it through the model, after which the plan
cuts the cache as it does after a prompt.

What no decode step can beat stands beside its time: the bytes that it must read, weights and cache, over the bandwidth
of a plain read measured here and now. On a GPU a step is timed from the host, which launches it kernel by kernel;
`kvtailor bench --tasks speed --graphs` times recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import read_bandwidth
from kvtailor.bench.micro.cases import VOCABULARY, model_states, random_llama
from kvtailor.bench.micro.tables import Advance, Bench, Cell, Table, compared
from kvtailor.bench.micro.timer import Measured, Side, time_in_turns
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.run.stock import dynamic_cache, fill, static_cache
from kvtailor.presets import FULL

__all__ = ["bench", "decode", "prefill"]

_ABOUT = """\
One decoded token, and a prefill, through a random Llama-shaped model with our caches and with transformers' own.
Divided by: StaticCache with sdpa, the fastest that transformers has (decode); our `full`, which keeps all (prefill)."""
_BASE = "StaticCache + sdpa"
_QUESTION = 64
_SMALLER = (
    "snapkv @ tokens={budget}",
    "snapkv + adakv @ tokens={budget}",
    "vector(bits=8)",
    "vector(bits=4)",
    "kivi(bits=4, group=64, recent=128)",
)
_STOCK_SIDES = 2
_SCORED = (FULL, "snapkv @ tokens={budget}", "h2o @ tokens={budget}")
_WARMUP, _PREFILL_WARMUP = 3, 1


def bench(
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    contexts: Sequence[int] = (8192, 32768),
    prefills: Sequence[int] = (8192,),
    rounds: int = 15,
    prefill_rounds: int = 3,
    device: torch.device,
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        dtypes: of model and cache.
        contexts: tokens held when a token is decoded.
        prefills: tokens of the prompts.
        rounds, prefill_rounds: timed rounds.
        device: of the model.
    """
    bandwidth = read_bandwidth(device)
    cells = []
    for name in dtypes:
        dtype = getattr(torch, name)
        for context in contexts:
            cells.append(
                Cell(
                    name=f"decode {name} {context}",
                    samples=(rounds + _WARMUP) * (_STOCK_SIDES + len(_SMALLER) + 2),
                    measure=partial(_decode_table, name, context, rounds, bandwidth, device),
                )
            )
        for context in prefills:
            cells.append(
                Cell(
                    name=f"prefill {name} {context}",
                    samples=(prefill_rounds + _PREFILL_WARMUP) * len(_SCORED),
                    measure=partial(_prefill_table, name, dtype, context, prefill_rounds, device),
                )
            )
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Bench(
        about=_ABOUT,
        machine=f"plain read here: {bandwidth / 1e9:.1f} GB/s with {where}",
        cells=cells,
        found={"read_bandwidth": bandwidth},
    )


@torch.no_grad()
def decode(
    dtype: torch.dtype, context: int, rounds: int, *, device: torch.device, advance: Advance = lambda name: None
) -> list[Measured]:
    """Seconds of one decoded token after `context` tokens, for each cache."""
    # Two models: ours has its attention switched as long as it has a cache of ours.
    model, stock = random_llama(dtype, device), random_llama(dtype, device)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    states = model_states(model, context)
    token = torch.tensor([[7]], device=device)
    sides: list[Side] = []

    def add(name: str, on: Any, cache: Any) -> None:
        held = bytes_of(cache)
        sides.append(
            Side(
                name=name,
                run=lambda _: on(token, past_key_values=cache, use_cache=True),
                bytes_read=None if held is None else weights + held,
                cache_bytes=held,
            )
        )

    static, dynamic = static_cache(stock, context + 2 * rounds + 16), dynamic_cache(stock)
    for cache in (static, dynamic):
        fill(cache, states)
    add(_BASE, stock, static)
    add("DynamicCache + sdpa", stock, dynamic)
    full = cache_for(model, FULL)
    fill(full, states)
    add(FULL, model, full)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (1, _QUESTION), generator=generator).to(device)
    for line in _SMALLER:
        plan = line.format(budget=context // 8)
        cache = cache_for(model, plan)
        fill(cache, states)
        model(ids, past_key_values=cache, logits_to_keep=1)
        model(token, past_key_values=cache)
        add(plan, model, cache)
    del states
    empty = cache_for(model, FULL)
    model(token, past_key_values=empty)
    add("full after one token", model, empty)
    return time_in_turns(sides, rounds, warmup=_WARMUP, device=device, advance=advance)


@torch.no_grad()
def prefill(
    dtype: torch.dtype, context: int, rounds: int, *, device: torch.device, advance: Advance = lambda name: None
) -> list[Measured]:
    """Seconds of one prefill of `context` tokens, for each plan."""
    model = random_llama(dtype, device)
    ids = torch.randint(0, VOCABULARY, (1, context), generator=torch.Generator().manual_seed(3)).to(device)

    def once(plan: str) -> Callable[[int], object]:
        return lambda _: model(ids, past_key_values=cache_for(model, plan), logits_to_keep=1)

    plans = [line.format(budget=context // 8) for line in _SCORED]
    sides = [Side(name=plan, run=once(plan)) for plan in plans]
    return time_in_turns(sides, rounds, warmup=_PREFILL_WARMUP, device=device, advance=advance)


def _decode_table(
    name: str, context: int, rounds: int, bandwidth: float, device: torch.device, advance: Advance
) -> Table:
    results = decode(getattr(torch, name), context, rounds, device=device, advance=advance)
    title = f"decode, {name}, {context} tokens of context"
    lines, rows = compared(title, results, _BASE, bandwidth=bandwidth)
    return Table(lines=lines, rows={f"decode {name} {context}": rows})


def _prefill_table(
    name: str, dtype: torch.dtype, context: int, rounds: int, device: torch.device, advance: Advance
) -> Table:
    results = prefill(dtype, context, rounds, device=device, advance=advance)
    lines, rows = compared(f"prefill, {name}, {context} tokens", results, FULL)
    return Table(lines=lines, rows={f"prefill {name} {context}": rows})


if __name__ == "__main__":
    raise SystemExit("this bench is a command now: kvtailor bench micro decode --help")
