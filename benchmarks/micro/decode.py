"""Does our machinery cost anything, and does a smaller cache pay? A decoded token and a prefill, against transformers.

    python -m benchmarks.micro decode [--dtype float32] [--contexts 8192,32768] [--prefill 8192] [--threads 2]
                                      [--device cuda] [--model random-qwen3-next] [--layers 1]

Three questions, each a ratio of two things that ran in turns in this one process:

1. *Does our machinery cost anything?* One decoded token on `full`, our cache that drops nothing, over one on
   transformers' `StaticCache` with sdpa. That is the fastest stock set-up: it writes in place and folds grouped heads.
   `DynamicCache`, the default, copies the whole cache at every step; it is shown beside and never divided by.
2. *Does evicting pay?* The same for caches that hold an eighth: `snapkv` (every head the same number), and
   `snapkv + adakv` (every head its own number), which must not be slower than `snapkv` at the same number of tokens.
   Codes of 8 and 4 bits hold every token, and are read as they are stored. What no cache can save is beside it: `full`
   after a single token, which is the rest of the model.
3. *What does a prompt cost?* A prefill under `full`, in chunks too, under `snapkv` (+ `adakv`) and under `h2o`, over
   one on transformers' `DynamicCache`, which joins nothing to an empty cache; `StaticCache` stands beside. Once more
   without a clock, each is run for the most memory that it took above what was there before it.

The model is `random-llama-gqa`, untrained: 4 layers of 32 query and 8 kv heads of 128, hidden size 1024 (`--layers`
makes it of fewer, so that long prompts take no minutes). The context is written into the caches directly; where a plan
evicts, 64 real tokens follow it through the model, after which the plan cuts the cache as it does after a prompt.

With `--model random-qwen3-next` it is a hybrid, of whose layers one in four attends. Then a line below the table has
what the context costs each of these layers (a step after the context, less one after a single token, by layers), beside
the same for a plain model of the same heads that runs in turns with it.

Our caches ask the system for huge pages where it leaves that to programs (`ops.huge_pages`), and transformers' do not.
So the stock cache stands there twice where that makes a difference, as it is and in such memory, and a line below the
table has the ratios to the second. `python -m benchmarks.micro pages` times every cache in both.

What no decode step can beat stands beside its time: the bytes that it must read, weights and cache, over the bandwidth
of a plain read measured here and now. A line below the table has the cache's part alone: a step less one of the rest of
the model, over a plain read of what the cache holds. On a GPU a step is timed from the host, which launches it kernel
by kernel; `kvtailor bench --tasks speed --graphs` times recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.micro.cases import MODEL, VOCABULARY, model_states, random_of
from benchmarks.micro.tables import Advance, Bench, Cell, Table, compared
from benchmarks.micro.timer import Measured, Side, time_in_turns
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import read_bandwidth
from kvtailor.bench.measure.memory_gauge import gauge_of
from kvtailor.bench.measure.statistics import spread
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.hf.run.prefill import prefill as read_context
from kvtailor.hf.run.stock import dynamic_cache, fill, into_huge_pages, static_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import huge_pages
from kvtailor.presets import FULL

__all__ = ["SMALLER", "bench", "decode", "prefill"]

_ABOUT = """\
One decoded token, and a prefill, through a random Llama-shaped model with our caches and with transformers' own.
Divided by: StaticCache with sdpa, the fastest that transformers has (decode); DynamicCache with sdpa (prefill)."""
_BASE = "StaticCache + sdpa"
_BASE_IN_HUGE_PAGES = "StaticCache + sdpa, huge pages"
_QUESTION = 64
# Plans that hold less than all; `{budget}` is an eighth of the context.
SMALLER = (
    "snapkv @ tokens={budget}",
    "snapkv + adakv @ tokens={budget}",
    "vector(bits=8)",
    "vector(bits=4)",
    "kivi(bits=4, group=64, recent=128)",
)
_STOCK_SIDES = 2
_SCORED = (FULL, "snapkv @ tokens={budget}", "snapkv + adakv @ tokens={budget}", "h2o @ tokens={budget}")
# Tokens of a chunk of a prompt.
_CHUNK = 1024
_WARMUP, _PREFILL_WARMUP = 3, 1
# Hybrids, and for each a plain model of the layers that attend.
_ATTENTION_ALONE = {"random-qwen3-next": "random-llama-256"}
_EMPTY, _DYNAMIC = "full after one token", "DynamicCache + sdpa"
_PLAIN, _PLAIN_EMPTY = "plain model, full", "plain model, after one token"
_PLAIN_SIDES = 2
# A cache of fewer bytes may lie in the processor's own, where a plain read of memory is no floor.
_LEAST_READ = 64 << 20


def bench(
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    contexts: Sequence[int] = (8192, 32768),
    prefills: Sequence[int] = (8192,),
    rounds: int = 15,
    prefill_rounds: int = 3,
    device: torch.device,
    model: str = MODEL,
    layers: int | None = None,
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        dtypes: of model and cache.
        contexts: tokens held when a token is decoded.
        prefills: tokens of the prompts.
        rounds, prefill_rounds: timed rounds.
        device: of the model.
        model: a name in `hf.model.config.RANDOM_SHAPES`.
        layers: of the model, where not as many as its shape has; no hybrid has them.
    """
    bandwidth = read_bandwidth(device)
    cells = []
    plain = _PLAIN_SIDES if model in _ATTENTION_ALONE else 0
    for name in dtypes:
        dtype = getattr(torch, name)
        for context in contexts:
            stock = _STOCK_SIDES + _differs_in_huge_pages(model, dtype, context, rounds, device)
            cells.append(
                Cell(
                    name=f"decode {name} {context}",
                    samples=(rounds + _WARMUP) * (stock + len(SMALLER) + 2 + plain),
                    measure=partial(_decode_table, name, context, rounds, bandwidth, device, model, layers),
                )
            )
        for context in prefills:
            cells.append(
                Cell(
                    name=f"prefill {name} {context}",
                    samples=(prefill_rounds + _PREFILL_WARMUP) * (_STOCK_SIDES + len(_SCORED) + (context > _CHUNK)),
                    measure=partial(_prefill_table, name, dtype, context, prefill_rounds, device, model, layers),
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
    dtype: torch.dtype,
    context: int,
    rounds: int,
    *,
    device: torch.device,
    advance: Advance = lambda name: None,
    name: str = MODEL,
    layers: int | None = None,
) -> list[Measured]:
    """Seconds of one decoded token after `context` tokens, for each cache."""
    # Two models: ours has its attention switched as long as it has a cache of ours.
    model, stock = random_of(name, dtype, device, layers), random_of(name, dtype, device, layers)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    states = model_states(model, context)
    token = torch.tensor([[7]], device=device)
    sides: list[Side] = []

    def add(name: str, on: Any, cache: Any) -> None:
        if name in (_BASE, _BASE_IN_HUGE_PAGES, _DYNAMIC, FULL):
            # States, where the model keeps any, are there once it has read a token, and are weighed then.
            on(token, **hand_cache(cache), use_cache=True)
        held = bytes_of(cache)
        sides.append(
            Side(
                name=name,
                run=lambda _: on(token, **hand_cache(cache), use_cache=True),
                bytes_read=None if held is None else weights + held,
                cache_bytes=held,
            )
        )

    slots = _static_slots(context, rounds)
    static, dynamic = static_cache(stock, slots), dynamic_cache(stock)
    for cache in (static, dynamic):
        fill(cache, states)
    add(_BASE, stock, static)
    add(_DYNAMIC, stock, dynamic)
    if _differs_in_huge_pages(name, dtype, context, rounds, device):
        advised = static_cache(stock, slots)
        fill(advised, states)
        into_huge_pages(advised)
        add(_BASE_IN_HUGE_PAGES, stock, advised)
    full = cache_for(model, FULL)
    fill(full, states)
    add(FULL, model, full)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (1, _QUESTION), generator=generator).to(device)
    for line in SMALLER:
        plan = line.format(budget=context // 8)
        cache = cache_for(model, plan)
        fill(cache, states)
        model(ids, **hand_cache(cache), logits_to_keep=1)
        model(token, **hand_cache(cache))
        add(plan, model, cache)
    del states
    _add_full(add, model, None, _EMPTY)
    if name in _ATTENTION_ALONE:
        alone = random_of(_ATTENTION_ALONE[name], dtype, device)
        _add_full(add, alone, model_states(alone, context), _PLAIN)
        _add_full(add, alone, None, _PLAIN_EMPTY)
    return time_in_turns(sides, rounds, warmup=_WARMUP, device=device, advance=advance)


def _add_full(add: Callable[[str, Any, Any], None], model: Any, states: Any, name: str) -> None:
    """Add a side: `full` after a context, or after a single token where `states` is None."""
    cache = cache_for(model, FULL)
    if states is None:
        model(torch.tensor([[7]], device=next(model.parameters()).device), **hand_cache(cache))
    else:
        fill(cache, states)
    add(name, model, cache)


def _static_slots(context: int, rounds: int) -> int:
    """Return how many tokens a stock cache must have room for: the context, and those that are timed."""
    return context + 2 * rounds + 16


def _differs_in_huge_pages(name: str, dtype: torch.dtype, context: int, rounds: int, device: torch.device) -> bool:
    """Return whether the tensors of a stock cache are such that huge pages would be asked for, were they ours."""
    shape, least = RANDOM_SHAPES[name], huge_pages.size_asked_for()
    slot = shape["num_key_value_heads"] * shape["head_dim"] * dtype.itemsize
    return device.type == "cpu" and least is not None and slot * _static_slots(context, rounds) >= least


@torch.no_grad()
def prefill(
    dtype: torch.dtype,
    context: int,
    rounds: int,
    *,
    device: torch.device,
    advance: Advance = lambda name: None,
    name: str = MODEL,
    layers: int | None = None,
) -> list[Measured]:
    """Seconds of one prefill of `context` tokens, for each cache, and the most memory that it took."""
    model, stock = random_of(name, dtype, device, layers), random_of(name, dtype, device, layers)
    ids = torch.randint(0, VOCABULARY, (1, context), generator=torch.Generator().manual_seed(3)).to(device)

    def once(plan: str) -> Callable[[int], object]:
        return lambda _: model(ids, **hand_cache(cache_for(model, plan)), logits_to_keep=1)

    def own(make: Callable[[], Any]) -> Callable[[int], object]:
        return lambda _: stock(ids, **hand_cache(make()), use_cache=True, logits_to_keep=1)

    plans = [line.format(budget=context // 8) for line in _SCORED]
    sides = [
        Side(name=_DYNAMIC, run=own(lambda: dynamic_cache(stock))),
        Side(name=_BASE, run=own(lambda: static_cache(stock, context))),
        *(Side(name=plan, run=once(plan)) for plan in plans),
    ]
    if context > _CHUNK:
        run = lambda _: read_context(model, ids, plan=FULL, chunk=_CHUNK)  # noqa: E731
        sides.insert(3, Side(name=f"{FULL}, in chunks of {_CHUNK}", run=run))
    results = time_in_turns(sides, rounds, warmup=_PREFILL_WARMUP, device=device, advance=advance)
    for measured, side in zip(results, sides, strict=True):
        measured.peak_bytes = _peak(side, device)
    return results


def _peak(side: Side, device: torch.device) -> int | None:
    """Bytes that one run takes at most above what is taken before; None where the system has no high-water mark."""
    try:
        gauge = gauge_of(device)
    except KvtailorError:
        return None
    before = gauge.now()
    gauge.reset()
    side.run(0)
    return gauge.highest() - before if gauge.resets and gauge.spilled() is None else None


def _decode_table(
    name: str,
    context: int,
    rounds: int,
    bandwidth: float,
    device: torch.device,
    model: str,
    layers: int | None,
    advance: Advance,
) -> Table:
    results = decode(getattr(torch, name), context, rounds, device=device, advance=advance, name=model, layers=layers)
    title = f"decode, {model}{_of_layers(layers)}, {name}, {context} tokens of context"
    lines, rows = compared(title, results, _BASE, bandwidth=bandwidth)
    lines += _over_huge_pages(results)
    above = caches_over_reads(results, bandwidth)
    lines += _told_over_reads(above)
    for row in rows:
        row["cache_over_read"] = above.get(row["name"])
    if model in _ATTENTION_ALONE:
        lines += _cost_of_context(results, model)
    return Table(lines=lines, rows={f"decode {name} {context}": rows})


def _over_huge_pages(results: Sequence[Measured]) -> list[str]:
    """Ratios to the stock cache in huge pages, where it was timed."""
    medians = {each.name: spread(each.seconds).median for each in results}
    base = medians.pop(_BASE_IN_HUGE_PAGES, None)
    if base is None:
        return []
    ratios = [f"{name} {median / base:.2f}" for name, median in medians.items() if median is not None]
    return [f"  of {_BASE_IN_HUGE_PAGES}: {'; '.join(ratios)}"]


def caches_over_reads(results: Sequence[Measured], bandwidth: float) -> dict[str, tuple[float, float, float]]:
    """How many times as long as a plain read of its bytes a cache takes: its step less that of `full` after one token.

    None has a cache whose bytes the processor's own caches may hold, nor the one that the rest is measured with.

    Args:
        results: of all sides.
        bandwidth: bytes per second of a plain read.

    Returns:
        A difference of two medians by name, and the range that the quartiles of both leave to it.
    """
    spreads = {each.name: spread(each.seconds) for each in results}
    rest = spreads.get(_EMPTY)
    if rest is None or rest.median is None or rest.q1 is None or rest.q3 is None:
        return {}
    found = {}
    for each in results:
        own = spreads[each.name]
        if each.name in (_EMPTY, _PLAIN, _PLAIN_EMPTY) or each.cache_bytes is None or each.cache_bytes < _LEAST_READ:
            continue
        if own.median is None or own.q1 is None or own.q3 is None:
            continue
        read = each.cache_bytes / bandwidth
        found[each.name] = ((own.median - rest.median) / read, (own.q1 - rest.q3) / read, (own.q3 - rest.q1) / read)
    return found


def _told_over_reads(above: dict[str, tuple[float, float, float]]) -> list[str]:
    if not above:
        return []
    ratios = [f"{name} {ratio:.1f} [{least:.1f}, {most:.1f}]" for name, (ratio, least, most) in above.items()]
    return [f"  the cache's part of a token over a plain read of its bytes: {'; '.join(ratios)}"]


def _prefill_table(
    name: str,
    dtype: torch.dtype,
    context: int,
    rounds: int,
    device: torch.device,
    model: str,
    layers: int | None,
    advance: Advance,
) -> Table:
    results = prefill(dtype, context, rounds, device=device, advance=advance, name=model, layers=layers)
    title = f"prefill, {model}{_of_layers(layers)}, {name}, {context} tokens"
    lines, rows = compared(title, results, _DYNAMIC)
    for i, measured in enumerate(results):
        rows[i]["peak_bytes"] = measured.peak_bytes
        if measured.peak_bytes is not None:
            lines[i - len(results)] += f"  peak {measured.peak_bytes / 2**20:.0f} MiB"
    return Table(lines=lines, rows={f"prefill {name} {context}": rows})


def _of_layers(layers: int | None) -> str:
    return "" if layers is None else f" of {layers} layer{'s' * (layers > 1)}"


def _cost_of_context(results: Sequence[Measured], model: str) -> list[str]:
    """What the context costs each layer that attends, in the hybrid and in the plain model of the same heads.

    A difference of two medians, with the range that the quartiles of both leave to it: the rest of a hybrid is large
    and noisy beside it.
    """
    spreads = {each.name: spread(each.seconds) for each in results}
    shapes = RANDOM_SHAPES[model], RANDOM_SHAPES[_ATTENTION_ALONE[model]]
    layers = shapes[0]["layer_types"].count("full_attention"), shapes[1]["num_hidden_layers"]
    costs = []
    for (after, before), count in zip(((FULL, _EMPTY), (_PLAIN, _PLAIN_EMPTY)), layers, strict=True):
        long, short = spreads[after], spreads[before]
        if None in (long.median, long.q1, long.q3, short.median, short.q1, short.q3):
            return ["  what the context costs a layer that attends: too few undisturbed samples"]
        ends = ((long.median, short.median), (long.q1, short.q3), (long.q3, short.q1))
        costs.append([((one or 0) - (other or 0)) / count * 1e3 for one, other in ends])
    (hybrid, least, most), (alone, low, high) = costs
    apart = "" if least > high or most < low else ", not told apart"
    return [
        f"  what the context costs a layer that attends: {hybrid:.2f} ms [{least:.2f}, {most:.2f}] in {model}, "
        f"{alone:.2f} ms [{low:.2f}, {high:.2f}] in {_ATTENTION_ALONE[model]}{apart}"
    ]
