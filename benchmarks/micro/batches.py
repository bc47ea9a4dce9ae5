"""Does a smaller cache pay for many rows at once? A decoded token of a whole batch, against transformers' StaticCache.

    python -m benchmarks.micro batches [--batches 8,32] [--contexts 4096,16384] [--dtype bfloat16] [--threads 2]

Weights are read once for all rows and the cache once for each, so a batch is where the cache is most of a step. Each
batch is timed in three forms, all of them in turns in one process:

- *uniform*: all rows are as long, and every head keeps as many tokens;
- *ragged*: each head keeps a number of its own (`adakv`);
- *padded*: rows begin after 0 to half of the context, evenly, with padding to their left. Divided by `StaticCache` with
  the same mask.

Beside each time stands what the machine needs to read the side's bytes once, and the tokens per second for each GiB
of cache: what a server gets out of memory. The model is that of `micro decode`; contexts are written
into the caches, and where a plan evicts, 64 tokens follow, after which it cuts the cache as it does after a prompt.
Before memory is taken, the bytes of all sides are held against what is free. A table without room is left out, with
the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.micro.cases import MODEL, VOCABULARY, fill_at_random, random_of
from benchmarks.micro.tables import Advance, Bench, Cell, Table, compared
from benchmarks.micro.timer import Measured, Side, time_in_turns
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import read_bandwidth
from kvtailor.bench.measure.memory_gauge import gauge_of
from kvtailor.bench.measure.statistics import spread
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.hf.run.stock import static_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.presets import FULL

__all__ = ["UNIFORM", "bench", "decode_batches"]

_ABOUT = """\
One decoded token of every row of a batch through a random Llama-shaped model.
Divided by: StaticCache with sdpa, the fastest that transformers has; padded rows by the same with their mask."""
_BASE, _PADDED_BASE, _PADDED = "StaticCache + sdpa", "StaticCache + sdpa, padded", ", padded"
_QUESTION, _WARMUP = 64, 3
# What each holds of the bytes of a cache in the model's own type of 16 bits, at most: what room is asked for.
UNIFORM = {FULL: 1.0, "vector(bits=8)": 0.55, "vector(bits=4)": 0.3, "snapkv @ tokens={budget}": 0.125}
_RAGGED = {"snapkv + adakv @ tokens={budget}": 0.125}
_OF_PADDED = {FULL: 1.0, "snapkv @ tokens={budget}": 0.125}


@dataclass(frozen=True)
class _Batch:
    """Rows, the tokens that each of them has read, and how often a token is timed."""

    rows: int
    context: int
    rounds: int

    @property
    def slots(self) -> int:
        """Of a cache that has room for all that is read and timed."""
        return self.context + _QUESTION + self.rounds + _WARMUP + 16

    def mask(self, padded: bool) -> Tensor:
        """(rows, slots) int64, 0 for the padding before a row."""
        mask = torch.ones(self.rows, self.slots, dtype=torch.int64)
        if padded:
            for row in range(self.rows):
                mask[row, : self.context // 2 * row // max(1, self.rows - 1)] = 0
        return mask


def bench(
    *,
    batches: Sequence[int] = (8, 32),
    contexts: Sequence[int] = (4096, 16384),
    rounds: int = 9,
    dtype: str = "bfloat16",
    device: torch.device,
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        batches: rows of a batch.
        contexts: tokens of each row.
        rounds: timed tokens of each row.
        dtype: of model and cache.
        device: of the model.
    """
    bandwidth = read_bandwidth(device)
    cells = [
        Cell(
            name=f"{rows} rows of {context}",
            samples=(rounds + _WARMUP) * (len(UNIFORM) + len(_RAGGED) + len(_OF_PADDED) + 2),
            measure=partial(_table, _Batch(rows, context, rounds), getattr(torch, dtype), bandwidth, device),
        )
        for rows in batches
        for context in contexts
    ]
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    machine = f"plain read here: {bandwidth / 1e9:.1f} GB/s with {where}"
    return Bench(about=_ABOUT, machine=machine, cells=cells, found={"read_bandwidth": bandwidth})


@torch.no_grad()
def decode_batches(
    batch: _Batch, dtype: torch.dtype, *, device: torch.device, advance: Advance = lambda name: None
) -> list[Measured]:
    """Seconds of one decoded token of all rows, for each cache."""
    # Two models: ours has its attention switched as long as it has a cache of ours.
    model, stock = random_of(MODEL, dtype, device), random_of(MODEL, dtype, device)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    ids = torch.randint(0, VOCABULARY, (batch.rows, _QUESTION), generator=torch.Generator().manual_seed(2)).to(device)
    token = ids[:, :1].contiguous()
    sides: list[Side] = []

    def add(name: str, on: Any, cache: Any, padded: bool) -> None:
        fill_at_random(cache, model, batch.rows, batch.context)
        mask = batch.mask(padded).to(device) if padded else None
        step = partial(_step, on, cache, mask, batch.context)
        step(ids, logits_to_keep=1)
        step(token)
        held = bytes_of(cache)
        sides.append(
            Side(
                name=name,
                run=lambda _: step(token),
                bytes_read=None if held is None else weights + held,
                cache_bytes=held,
            )
        )

    for padded, base, plans in ((False, _BASE, (*UNIFORM, *_RAGGED)), (True, _PADDED_BASE, _OF_PADDED)):
        add(base, stock, static_cache(stock, batch.slots), padded)
        for line in plans:
            plan = line.format(budget=batch.context // 8)
            add(plan + _PADDED * padded, model, cache_for(model, plan), padded)
    return time_in_turns(sides, batch.rounds, warmup=_WARMUP, device=device, advance=advance)


def _step(model: Any, cache: Any, mask: Tensor | None, context: int, ids: Tensor, **options: Any) -> Any:
    """Read `ids` (rows, n) behind what the cache has seen, with as much of the mask (rows, slots) as that makes."""
    if mask is not None:
        # A cache that was filled directly has not read its context's mask yet: it gets it with the first tokens.
        seen, new = int(cache.get_seq_length()), ids.shape[1]
        options["attention_mask"] = mask[:, : seen + new]
        first = mask[:, :context].sum(-1, keepdim=True) - context
        options["position_ids"] = seen + torch.arange(new, device=ids.device) + first
    return model(ids, **hand_cache(cache), use_cache=True, **options)


def _needed(batch: _Batch, dtype: torch.dtype) -> int:
    """Bytes of all sides' caches at most, and of a layer that is being written."""
    shape = RANDOM_SHAPES[MODEL]
    layers = shape["num_hidden_layers"]
    whole = batch.rows * batch.slots * layers * 2 * shape["num_key_value_heads"] * shape["head_dim"] * dtype.itemsize
    shares = [*UNIFORM.values(), *_RAGGED.values(), *_OF_PADDED.values()]
    # Two stock caches; one plan at a time that holds everything until it evicts; what grows while a layer is written.
    return int((2 + sum(shares) + 1 + 3 / layers) * whole)


def _free(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not tell."""
    try:
        return gauge_of(device).free
    except KvtailorError:
        return None


def _table(batch: _Batch, dtype: torch.dtype, bandwidth: float, device: torch.device, advance: Advance) -> Table:
    key = f"decode {batch.rows} x {batch.context}"
    title = f"{batch.rows} rows of {batch.context} tokens, {MODEL}, {str(dtype).removeprefix('torch.')}"
    needed, free = _needed(batch, dtype), _free(device)
    if free is not None and needed > free:
        lacking = f"not measured: its caches take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
        return Table(lines=["", title, f"  {lacking}"], rows={key: {"not_measured": lacking}})
    results = decode_batches(batch, dtype, device=device, advance=advance)
    plain, padded = _parted(results)
    lines, rows = compared(title, plain, _BASE, bandwidth=bandwidth)
    more, others = compared("  with padding before all rows but the first", padded, _PADDED_BASE, bandwidth=bandwidth)
    return Table(
        lines=[*_with_rates(lines, plain, batch.rows), *_with_rates(more[1:], padded, batch.rows)],
        rows={
            key: [
                row | {"tokens_per_second_per_gib": _rate(each, batch.rows)}
                for row, each in zip(rows + others, plain + padded, strict=True)
            ]
        },
    )


def _parted(results: Iterable[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Sides without padding, and those with it."""
    both: tuple[list[Measured], list[Measured]] = [], []
    for each in results:
        both[each.name.endswith(_PADDED)].append(each)
    return both


def _rate(measured: Measured, rows: int) -> float | None:
    """Tokens per second of all rows for each GiB that the cache holds; None without a time or a size."""
    middle = spread(measured.seconds).median
    return None if middle is None or not measured.cache_bytes else rows / middle / (measured.cache_bytes / 2**30)


def _with_rates(lines: Sequence[str], results: Sequence[Measured], rows: int) -> list[str]:
    """The lines of a table, its first ones as they are, each side's with its rate at the end."""
    above = len(lines) - len(results)
    rates = [_rate(each, rows) for each in results]
    ends = ["" if rate is None else f"  {rate:.0f} tokens/s a GiB" for rate in rates]
    return [*lines[:above], *(line + end for line, end in zip(lines[above:], ends, strict=True))]
