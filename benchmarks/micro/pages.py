"""What do huge pages bring? A decoded token with the cache in small pages and in huge ones: ours, and transformers'.

    python -m benchmarks.micro pages [--dtype bfloat16] [--contexts 32768] [--threads 1]

The model, the plans and the way in which caches are filled are those of `micro decode`. Every cache is
there twice, and all take turns in this one process. In the first its large tensors are torch's own; in the second they
lie in memory for which huge pages were asked for before the first write (`ops.huge_pages`). transformers' `StaticCache`
never asks, so it is copied into such memory once it is filled. `DynamicCache` makes new tensors at every token, for
which nothing can be asked from outside; it is there once.

The weights of the model lie in small pages throughout. A last column says how much of each cache the system really gave
huge pages, read from /proc/self/smaps: it may refuse, where its memory is in small pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.micro.cases import MODEL, VOCABULARY, model_states, random_of
from benchmarks.micro.decode import SMALLER
from benchmarks.micro.tables import Advance, Bench, Cell, Table, compared
from benchmarks.micro.timer import Measured, Side, time_in_turns
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import read_bandwidth
from kvtailor.bench.measure.statistics import spread
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.run.stock import dynamic_cache, fill, into_huge_pages, static_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import huge_pages
from kvtailor.presets import FULL

__all__ = ["IN_HUGE_PAGES", "bench", "decode"]

_ABOUT = """\
One decoded token of a random Llama-shaped model: every cache in small pages, and in huge pages that were asked for.
Divided by: transformers' StaticCache with sdpa, in huge pages."""
_STATIC, _DYNAMIC = "StaticCache + sdpa", "DynamicCache + sdpa"
IN_HUGE_PAGES = ", huge pages"
_QUESTION, _WARMUP = 64, 3
_PLANS = (FULL, *SMALLER)


def bench(
    *,
    dtypes: Sequence[str] = ("bfloat16",),
    contexts: Sequence[int] = (32768,),
    rounds: int = 15,
    device: torch.device,
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        dtypes: of model and caches.
        contexts: tokens held when a token is decoded.
        rounds: timed rounds.
        device: of the model.

    Raises:
        KvtailorError: huge pages are not asked for here, so that there is nothing to compare.
    """
    if device.type != "cpu":
        raise KvtailorError(f"Huge pages are asked for on the CPU, and the device is {device}: leave --device out.")
    if huge_pages.size_asked_for() is None:
        raise KvtailorError(f"Huge pages are {huge_pages.explained()}. So there is nothing to compare.")
    with huge_pages.asking(False):
        small = read_bandwidth(device)
    bandwidth = max(small, read_bandwidth(device))
    cells = [
        Cell(
            name=f"pages {name} {context}",
            samples=(rounds + _WARMUP) * (2 * (1 + len(_PLANS)) + 1),
            measure=partial(_table, name, context, rounds, bandwidth, device),
        )
        for name in dtypes
        for context in contexts
    ]
    read = f"plain read here: {small / 1e9:.1f} GB/s in small pages, {bandwidth / 1e9:.1f} the faster of both"
    return Bench(
        about=_ABOUT,
        machine=f"{read}, with {torch.get_num_threads()} threads; huge pages are {huge_pages.explained()}",
        cells=cells,
        found={"read_bandwidth": bandwidth, "read_bandwidth_in_small_pages": small},
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
) -> tuple[list[Measured], dict[str, int]]:
    """Return seconds of one decoded token after `context` tokens, and bytes in huge pages, for each cache.

    Args:
        dtype: of model and caches.
        context: tokens held.
        rounds: timed rounds.
        device: the CPU.
        advance: called after each sample.
        name: of the model, in `hf.model.config.RANDOM_SHAPES`.
    """
    # Two models: ours has its attention switched as long as it has a cache of ours.
    model, stock = random_of(name, dtype, device), random_of(name, dtype, device)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    states, token = model_states(model, context), torch.tensor([[7]], device=device)
    ids = torch.randint(0, VOCABULARY, (1, _QUESTION), generator=torch.Generator().manual_seed(2)).to(device)
    sides: list[Side] = []
    given: dict[str, int] = {}

    def add(name: str, on: Any, make: Callable[[], Any], asked: bool) -> None:
        def step(_: int) -> None:
            # What grows while it is timed stays in pages of the same size.
            with huge_pages.asking(asked):
                on(token, **hand_cache(cache), use_cache=True)

        name += IN_HUGE_PAGES if asked else ""
        before = _in_huge_pages()
        with huge_pages.asking(asked):
            cache = make()
        step(0)
        given[name] = _in_huge_pages() - before
        held = bytes_of(cache)
        read = None if held is None else weights + held
        sides.append(Side(name=name, run=step, bytes_read=read, cache_bytes=held))

    def static(asked: bool) -> Any:
        cache = static_cache(stock, context + 2 * rounds + 16)
        fill(cache, states)
        if asked:
            into_huge_pages(cache)
        return cache

    def dynamic() -> Any:
        cache = dynamic_cache(stock)
        fill(cache, states)
        return cache

    def ours(plan: str) -> Any:
        cache = cache_for(model, plan)
        fill(cache, states)
        if plan != FULL:
            # The plan cuts or encodes what was filled in, as after a prompt.
            model(ids, **hand_cache(cache), logits_to_keep=1)
        return cache

    for asked in (False, True):
        add(_STATIC, stock, partial(static, asked), asked)
    add(_DYNAMIC, stock, dynamic, False)
    for line in _PLANS:
        plan = line.format(budget=context // 8)
        for asked in (False, True):
            add(plan, model, partial(ours, plan), asked)
    states.clear()
    return time_in_turns(sides, rounds, warmup=_WARMUP, device=device, advance=advance), given


def _table(name: str, context: int, rounds: int, bandwidth: float, device: torch.device, advance: Advance) -> Table:
    results, given = decode(getattr(torch, name), context, rounds, device=device, advance=advance)
    title = f"decode, {MODEL}, {name}, {context} tokens of context"
    lines, rows = compared(title, results, _STATIC + IN_HUGE_PAGES, bandwidth=bandwidth)
    for row, measured in zip(rows, results, strict=True):
        row["bytes_in_huge_pages"] = given[measured.name]
    return Table(lines=[*lines, *_brought(results, given)], rows={f"pages {name} {context}": rows})


def _brought(results: Sequence[Measured], given: dict[str, int]) -> list[str]:
    """Return a line for each cache that was timed in both: what is left of its time in huge pages, and its share of
    them."""
    medians = {each.name: spread(each.seconds).median for each in results}
    lines = ["  time in huge pages over time in small ones, and the share of the cache that the system gave them"]
    for measured in results:
        small, large = medians[measured.name], medians.get(measured.name + IN_HUGE_PAGES)
        if small is None or large is None:
            continue
        name = measured.name + IN_HUGE_PAGES
        held = next(each.cache_bytes for each in results if each.name == name)
        share = "" if not held else f"{min(1.0, given[name] / held):6.0%}"
        lines.append(f"  {measured.name:34s} {large / small:5.2f} {share}")
    return lines


def _in_huge_pages() -> int:
    """Bytes of this process's own memory that lie in huge pages now."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))
