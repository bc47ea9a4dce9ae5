"""Our quantised cache against transformers' own `QuantizedCache`, at the same bits, groups and full-precision tail.

    pip install optimum-quanto hqq termcolor
    python -m benchmarks.micro builtins [--contexts 8192,32768] [--bits 4,2] [--backends quanto,hqq] [--text FILE]

Three questions, everything in turns in this one process:

1. *What does a decoded token cost?* The model of `python -m benchmarks.micro decode`, contexts written into the caches
   directly. The ratio is to `QuantizedCache`; `full` and `StaticCache`, which quantise nothing, stand beside.
2. *What does quantise-and-pack add to a prefill?* A prefill under our codec over one under `full`; processor time.
3. *What is lost?* The embedded model, windows of a text: a context is prefilled, then the continuation is fed in pieces
   of 32 tokens, so that `QuantizedCache` encodes its past again, as it does when it generates. Nats per token,
   paired over the windows.

A backend that is not installed is said and left out. Samples that other programs disturbed are left out and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.micro.cases import GROUP, VOCABULARY, model_states, random_llama
from benchmarks.micro.tables import Advance, Bench, Cell, Table, compared
from benchmarks.micro.timer import Measured, Side, time_in_turns
from kvtailor.bench.data.texts import generated_text, read_text
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import read_bandwidth
from kvtailor.bench.measure.statistics import Estimate, mean_difference, spread
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.loading import load
from kvtailor.hf.run.stock import fill, quantized_cache, static_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.presets import FULL

__all__ = ["BACKENDS", "bench", "decode", "lost", "packing"]

_ABOUT = """\
Our kivi codec against transformers' QuantizedCache, at the same bits, groups and full-precision tail: seconds of a
decoded token (divided by QuantizedCache), what packing adds to a prefill, and nats per token that are lost."""
BACKENDS = ("quanto", "hqq")
_TAIL, _PIECE = 128, 32
_STATIC = "StaticCache + sdpa"
_WARMUP, _PACKING_WARMUP = 2, 1


def bench(
    *,
    dtype: str = "bfloat16",
    contexts: Sequence[int] = (8192, 32768),
    packings: Sequence[int] = (8192,),
    bits: Sequence[int] = (4, 2),
    backends: Sequence[str] = BACKENDS,
    rounds: int = 9,
    packing_rounds: int = 3,
    text: Path | None = None,
    windows: int = 20,
    context: int = 1024,
    continuation: int = 256,
    device: torch.device,
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        dtype: of the first two questions; the third is in float32.
        contexts: tokens held when a token is decoded.
        packings: tokens of the prompts.
        bits: of codes.
        backends: of `QuantizedCache`; those that are not installed are left out, and named.
        rounds, packing_rounds: timed rounds.
        text: a text file; None: a generated text.
        windows: of the text; 0: no quality.
        context, continuation: tokens of a window that are compressed, and tokens that are scored after them.
        device: of the models.
    """
    installed, left_out = _installed(backends)
    bandwidth = read_bandwidth(device)
    cells = [
        Cell(
            name=f"decode, {dtype}, {size} tokens",
            samples=(rounds + _WARMUP) * (2 + len(bits) * (1 + len(installed))),
            measure=partial(_decode_table, dtype, size, rounds, installed, bits, bandwidth, device),
        )
        for size in contexts
    ]
    cells += [
        Cell(
            name=f"packing, {dtype}, {size} tokens",
            samples=(packing_rounds + _PACKING_WARMUP) * (1 + len(bits)),
            measure=partial(_packing_table, dtype, size, packing_rounds, bits, device),
        )
        for size in packings
    ]
    if windows:
        measure = partial(_lost_table, text, context, continuation, windows, installed, bits, device)
        samples = windows * (1 + len(bits) * (1 + len(installed)))
        cells.append(Cell(name=f"nats, {windows} windows", samples=samples, measure=measure))
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    machine = [f"plain read here: {bandwidth / 1e9:.1f} GB/s with {where}", *left_out]
    return Bench(about=_ABOUT, machine="\n".join(machine), cells=cells, found={"read_bandwidth": bandwidth})


@torch.no_grad()
def decode(
    dtype: torch.dtype,
    context: int,
    rounds: int,
    backends: Sequence[str],
    bits: Sequence[int],
    *,
    device: torch.device,
    advance: Advance = lambda name: None,
) -> list[Measured]:
    """Seconds of one decoded token after `context` tokens, for each cache."""
    ours, stock = random_llama(dtype, device), random_llama(dtype, device)
    weights = sum(parameter.nbytes for parameter in ours.parameters())
    states, token = model_states(ours, context), torch.tensor([[7]], device=device)
    makers: dict[str, Callable[[Any], Any]] = {
        _STATIC: lambda model: static_cache(model, context + 2 * rounds + 16),
        FULL: lambda model: cache_for(model, FULL),
        **_makers(backends, bits),
    }
    sides = []
    for name, make in makers.items():
        on = stock if "Cache" in name else ours
        cache = make(on)
        fill(cache, states)
        if "kivi" in name:
            # Two tokens more than one, so that what was written is encoded as after a prompt.
            on(token.repeat(1, 2), **hand_cache(cache), logits_to_keep=1)
        # transformers' quantised layers keep their codes where no field of a cache shows them.
        held = None if name.startswith("QuantizedCache") else bytes_of(cache)
        sides.append(
            Side(
                name=name,
                run=partial(_step, on, token, cache),
                bytes_read=None if held is None else weights + held,
                cache_bytes=held,
            )
        )
    return time_in_turns(sides, rounds, warmup=_WARMUP, device=device, advance=advance)


@torch.no_grad()
def packing(
    dtype: torch.dtype,
    context: int,
    rounds: int,
    bits: Sequence[int],
    *,
    device: torch.device,
    advance: Advance = lambda name: None,
) -> dict[str, list[float]]:
    """For each of our codecs the processor time of its prefill over that of `full`, one ratio for each round."""
    model = random_llama(dtype, device)
    ids = torch.randint(0, VOCABULARY, (1, context), generator=torch.Generator().manual_seed(2)).to(device)

    def once(plan: str) -> Callable[[int], object]:
        return lambda _: model(ids, **hand_cache(cache_for(model, plan)), logits_to_keep=1)

    sides = [Side(name=plan, run=once(plan)) for plan in (FULL, *(_ours(b) for b in bits))]
    # Processor time, which other programs hardly touch, where work is done by the processor.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    full, *others = time_in_turns(sides, rounds, warmup=_PACKING_WARMUP, device=device, clock=clock, advance=advance)
    return {each.name: [a / b for a, b in zip(each.seconds, full.seconds, strict=True)] for each in others}


@torch.no_grad()
def lost(
    text: str,
    context: int,
    continuation: int,
    windows: int,
    backends: Sequence[str],
    bits: Sequence[int],
    *,
    device: torch.device,
    advance: Advance = lambda name: None,
) -> dict[str, list[float]]:
    """Mean nats per token of each window's continuation, for each cache and `full`.

    Raises:
        KvtailorError: the text has too few tokens.
    """
    ours, tokenizer = load("demo", dtype=torch.float32, device=device)
    stock, _ = load("demo", dtype=torch.float32, device=device)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0].to(device)
    size = context + continuation
    if len(ids) < windows * size:
        raise KvtailorError(f"{windows} windows of {size} tokens were asked for, and the text has {len(ids)} tokens")
    makers = {FULL: lambda model: cache_for(model, FULL), **_makers(backends, bits)}
    found: dict[str, list[float]] = {name: [] for name in makers}
    for window in ids[: windows * size].view(windows, 1, size):
        for name, make in makers.items():
            model = stock if "Cache" in name else ours
            cache = make(model)
            logits = [model(window[:, :context], **hand_cache(cache), logits_to_keep=1).logits]
            for first in range(context, size - 1, _PIECE):
                piece = window[:, first : min(first + _PIECE, size - 1)]
                logits.append(model(piece, **hand_cache(cache)).logits)
            found[name].append(_nats(torch.cat(logits, 1)[0], window[0, context:]))
            advance(name)
    return found


def _ours(bits: int) -> str:
    return f"kivi(bits={bits}, group={GROUP}, recent={_TAIL})"


def _makers(backends: Sequence[str], bits: Sequence[int]) -> dict[str, Callable[[Any], Any]]:
    """By name, what makes each cache for a model."""
    made: dict[str, Callable[[Any], Any]] = {}
    for b in bits:
        made[_ours(b)] = partial(cache_for, plan=_ours(b))
        for backend in backends:
            make = partial(quantized_cache, backend=backend, bits=b, group=GROUP, tail=_TAIL)
            made[f"QuantizedCache {backend} {b} bits"] = make
    return made


def _step(model: Any, token: Tensor, cache: Any, layer: int) -> None:
    model(token, **hand_cache(cache))


def _decode_table(
    name: str,
    context: int,
    rounds: int,
    backends: Sequence[str],
    bits: Sequence[int],
    bandwidth: float,
    device: torch.device,
    advance: Advance,
) -> Table:
    results = decode(getattr(torch, name), context, rounds, backends, bits, device=device, advance=advance)
    lines, tables = [], {}
    for b in bits:
        for backend in backends:
            base = f"QuantizedCache {backend} {b} bits"
            mine = [m for m in results if m.name in (_STATIC, FULL, base, _ours(b))]
            title = f"decode, {name}, {context} tokens of context"
            more, tables[f"decode {context} {backend} {b}"] = compared(title, mine, base, bandwidth=bandwidth)
            lines += more
    if not backends:
        title = f"decode, {name}, {context} tokens of context; no backend of QuantizedCache is installed"
        lines, tables[f"decode {context}"] = compared(title, results, _STATIC, bandwidth=bandwidth)
    return Table(lines=lines, rows=tables)


def _packing_table(
    name: str, context: int, rounds: int, bits: Sequence[int], device: torch.device, advance: Advance
) -> Table:
    lines, tables = [""], {}
    clock = "processor time" if device.type == "cpu" else "time"
    for plan, ratios in packing(getattr(torch, name), context, rounds, bits, device=device, advance=advance).items():
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        lines.append(
            f"prefill of {context} tokens under {plan}: {spread(ratios).median:.3f} of full's {clock} ({each})"
        )
        tables[f"packing {context} {plan}"] = ratios
    return Table(lines=lines, rows=tables)


def _lost_table(
    path: Path | None,
    context: int,
    continuation: int,
    windows: int,
    backends: Sequence[str],
    bits: Sequence[int],
    device: torch.device,
    advance: Advance,
) -> Table:
    text = generated_text(8 * windows * (context + continuation)) if path is None else read_text(path)
    nats = lost(text, context, continuation, windows, backends, bits, device=device, advance=advance)
    lines = ["", f"nats per token of {continuation} after {context} tokens, {windows} windows"]
    for name, values in nats.items():
        own = mean_difference(values, nats[FULL])
        lines.append(f"  {name:34s} {sum(values) / len(values):.4f}  to full {_said(own)}")
    for b in bits:
        for backend in backends:
            gap = mean_difference(nats[_ours(b)], nats[f"QuantizedCache {backend} {b} bits"])
            lines.append(f"  ours less {backend}, {b} bits: {_said(gap)}")
    return Table(lines=lines, rows={"nats": nats})


def _said(found: Estimate) -> str:
    interval = "too few windows" if found.low is None else f"{found.low:+.4f} to {found.high:+.4f}"
    return f"{found.value:+.4f} ({interval})"


def _nats(logits: Tensor, targets: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.double(), targets))


def _installed(backends: Sequence[str]) -> tuple[list[str], list[str]]:
    """The backends whose library is here, and a sentence for each of the others."""
    found, left_out = [], []
    model = random_llama(torch.float32, torch.device("cpu")) if backends else None
    for backend in backends:
        try:
            quantized_cache(model, backend, bits=4, group=GROUP, tail=_TAIL)
            found.append(backend)
        except ImportError as error:
            left_out.append(f"QuantizedCache with {backend} is left out: {str(error).strip().split('. ')[0]}")
    return found, left_out
