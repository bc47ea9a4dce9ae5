"""The kernels of GPUs against what a user has instead: `kvtailor bench kernels --device cuda`.

As `kernels`, of which this is the other half: correctness first, floor beside, everything in turns in one process. What
a sample times is one CUDA graph that does a thing on every layer in turn, between two events, so that neither the host
nor the second-level cache has a part in it. What cannot be recorded (it waits for the device) is timed from the host,
and its name says so.

1. *Attention of one token*, grouped and single heads, by tokens held and rows: our kernel over bfloat16, int8, int4,
   KIVI in 4 and 2 bits; torch's fused attention as transformers calls it and with folded heads; dequantising first; a
   step of transformers' caches; a read and a copy of the bfloat16 bytes.
2. *Quest's pages*: 2,048 tokens chosen by their bounds, all included, over reading everything.
3. *Ragged heads*: lengths from a quarter to four times the mean, over uniform ones of the same tokens in all.
4. *Query blocks* of 4 and 16 over one query. 5. *Appending* a token to a tail in place.
6. *Packing*: making codes, over a copy of the states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtailor.attend.contract import LayerFacts
from kvtailor.attend.quest import Quest
from kvtailor.bench.foundation import Measured, report
from kvtailor.bench.kernels import RAGGED_PAGE, RIGHT, SCALE, SIDES, SIZE, exact_side, ragged_pages, stock_step
from kvtailor.encode.indexed import Indexed
from kvtailor.hf.mask import LazyMask
from kvtailor.hf.stock import layer_makers
from kvtailor.ops.attention import reference
from kvtailor.ops.coded import Coded
from kvtailor.ops.triton.attend import attend_coded, attend_pages
from kvtailor.ops.triton.quantise import channel_codes, symmetric_codes, token_codes
from kvtailor.ops.twins import using
from kvtailor.types import Layout, PlainSegment

__all__ = ["measure", "samples"]

# Several times the largest second-level cache, between two visits of a layer.
_APART = 1 << 28
_CHECKED = 8
_PAGE, _BUDGET = 16, 2048
_HEADS = (("grouped heads, 32 on 8", 8, 4), ("single heads, 32 on 32", 32, 1))
# What is done on one layer; work over several is done on each in turn.
_Work = Callable[[int], object]


def samples(work: Sequence[tuple[str, _Work]], layers: int, rounds: int, device: torch.device) -> list[Measured]:
    """Seconds of one layer, each thing once a round; every sample goes over all layers."""
    made = [(Measured(name), _runner(name, each, layers, device)) for name, each in work]
    for round_ in range(rounds + 3):
        turn = round_ % len(made)
        for measured, run in made[turn:] + made[:turn]:
            seconds = run()
            if round_ >= 3:
                measured.seconds.append(seconds / layers)
    return [measured for measured, _ in made]


def _runner(name: str, work: _Work, layers: int, device: torch.device) -> Callable[[], float]:
    def everything() -> None:
        for layer in range(layers):
            work(layer)

    if device.type != "cuda" or "not recorded" in name:

        def from_the_host() -> float:
            _wait(device)
            begin = time.perf_counter()
            everything()
            _wait(device)
            return time.perf_counter() - begin

        return from_the_host
    everything()
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replayed() -> float:
        begin.record()
        graph.replay()
        end.record()
        _wait(device)
        return float(begin.elapsed_time(end)) / 1e3

    return replayed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure(
    device: torch.device, contexts: Sequence[int], batches: Sequence[int], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Prints the tables, and gives them by title. Points that the device has no room for are left out, and named."""
    tables = {}
    with using("triton"):
        for tokens in contexts:
            for rows in batches:
                for title, heads, group in _HEADS:
                    where = f"{title}, {tokens} tokens, {rows} rows"
                    floor = 2 * rows * heads * tokens * SIZE * 2
                    layers = max(1, min(8, _APART // floor + 1))
                    if not _fits(device, 5 * layers * floor, where):
                        continue
                    work = _attention(device, rows * heads, group, tokens, layers)
                    tables[where] = report(where, samples(work, layers, rounds, device), "kvtailor bfloat16")
            for title, make, base in (
                ("Quest's pages", _pages, "everything, bfloat16"),
                ("ragged heads", _ragged, "uniform heads, bfloat16"),
                ("query blocks", _blocks, "bfloat16, 1 queries"),
                ("appending", _appending, "attention, bfloat16"),
                ("packing", _packing, "a copy of the states"),
            ):
                layers = max(1, min(8, _APART // (2 * 8 * tokens * SIZE * 2) + 1))
                where = f"{title}, {tokens} tokens"
                tables[where] = report(where, samples(make(device, tokens, layers), layers, rounds, device), base)
    return tables


def _fits(device: torch.device, size: int, where: str) -> bool:
    if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0]:
        print(f"\n{where}: left out, its layers take {size / 2**30:.0f} GiB and less is free")
        return False
    return True


def _states(device: torch.device, lanes: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shape, dtype = (lanes, tokens, SIZE), torch.bfloat16 if device.type == "cuda" else torch.float16
    keys, values = (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) for _ in range(2))
    return keys.to(dtype), values.to(dtype)


def _query(device: torch.device, *shape: int) -> Tensor:
    return torch.randn((*shape, SIZE), generator=torch.Generator(device).manual_seed(9), device=device)


def _attention(device: torch.device, lanes: int, group: int, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    half = [_states(device, lanes, tokens, seed) for seed in range(layers)]
    query = _query(device, lanes, group, 1).to(half[0][0].dtype)
    work: list[tuple[str, _Work]] = [
        (
            "a read of the bfloat16 bytes",
            lambda i: (half[i][0].view(torch.int16).amax(), half[i][1].view(torch.int16).amax()),
        ),
        ("a copy of half of them", lambda i: half[i][0].clone()),
    ]
    for name, (of_keys, of_values) in SIDES.items():
        sides = [(of_keys(keys), of_values(values)) for keys, values in half]
        right = _is_right(f"kvtailor {name}", query, sides[0], partial(_ours, query, sides))
        if right:
            work.append((f"kvtailor {name}", partial(_ours, query, sides)))
        if name in ("int8", "kivi 4 bits"):
            work.append((f"dequantised first, {name}", partial(_dequantised, query, sides)))
    for name, fold in (("sdpa as transformers calls it", False), ("sdpa, heads folded", True)):
        work.append((name, partial(_fused, query, half, fold)))
    for name, make in layer_makers(bits=4, group=64, tail=128).items():
        try:
            caches = [make() for _ in range(layers)]
        except ImportError as missing:
            print(f"{name} is left out: {missing}")
            continue
        for cache, (keys, values) in zip(caches, half, strict=True):
            cache.update(keys[None], values[None])
        work.append((f"{name} + sdpa, not recorded", stock_step(query, caches, query.dtype)))
    return work


def _ours(query: Tensor, sides: Sequence[tuple[Coded, Coded]], layer: int) -> Tensor:
    return attend_coded(query, *sides[layer], scaling=SCALE)[0]


def _is_right(name: str, query: Tensor, side: tuple[Coded, Coded], attend: Callable[[int], Tensor]) -> bool:
    """Prints the relative error of the first lanes of the first layer."""
    keys, values = (
        exact_side(each.rows(torch.arange(min(_CHECKED, len(query)), device=query.device))) for each in side
    )
    rows = query[: len(keys)].double().flatten(0, 1)[None]
    out, _, _ = reference(rows, keys[None], values[None], None, SCALE)
    error = float((attend(0)[: len(keys)].double().reshape(out.shape) - out).norm() / out.norm())
    print(f"  {name:34s} relative error {error:.1e}{'' if error <= RIGHT else '  RED: not timed'}")
    return error <= RIGHT


def _fused(query: Tensor, half: Sequence[tuple[Tensor, Tensor]], fold: bool, layer: int) -> Tensor:
    lanes, group, new, size = query.shape
    keys, values = (each[None] for each in half[layer])
    if fold:
        return scaled_dot_product_attention(query.reshape(1, lanes, group * new, size), keys, values, scale=SCALE)
    rows = query.reshape(1, lanes * group, new, size)
    return scaled_dot_product_attention(rows, keys, values, scale=SCALE, enable_gqa=group > 1)


def _dequantised(query: Tensor, sides: Sequence[tuple[Coded, Coded]], layer: int) -> Tensor:
    keys, values = (side.decode() for side in sides[layer])
    return _fused(query, [(keys, values)], True, 0)


def _pages(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    """Of 8 kv heads: Quest by its bounds, from the host and (of chosen pages alone) recorded, and everything."""
    half = [_states(device, 8, tokens, seed) for seed in range(layers)]
    query = _query(device, 8, 4, 1).to(half[0][0].dtype)
    layout = Layout(rows=1, heads=8, size=tokens, start=0)
    tail = Layout(rows=1, heads=8, size=1, start=tokens)
    held = [
        [
            Indexed(page=_PAGE).encode(layout, keys, values),
            PlainSegment(layout=tail, keys=keys[:, :1].clone(), values=values[:, :1].clone()),
        ]
        for keys, values in half
    ]
    method, facts = Quest(tokens=_BUDGET, dense_layers=0), LayerFacts(layer=1, layers=2)
    visible = LazyMask.causal(1, 1, tokens, device)
    count = min(tokens, _BUDGET) // _PAGE
    pages = torch.stack([torch.randperm(tokens // _PAGE)[:count] for _ in range(8)]).to(device, torch.int32)
    sides = [(SIDES["bfloat16"][0](keys), SIDES["bfloat16"][1](values)) for keys, values in half]
    heads = query.reshape(1, 32, 1, SIZE)
    return [
        ("everything, bfloat16", partial(_ours, query, sides)),
        (f"{_BUDGET} tokens of pages", lambda i: attend_pages(query, *sides[i], pages, _PAGE, scaling=SCALE)),
        (
            f"quest, {_BUDGET} tokens, not recorded",
            lambda i: method.attend(heads, held[i], visible, SCALE, facts=facts),
        ),
    ]


def _ragged(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    query = _query(device, 8, 4, 1)
    work: list[tuple[str, _Work]] = []
    for name, counts in ragged_pages(8, tokens):
        owner = torch.repeat_interleave(torch.arange(8), counts).to(device)
        half = [_states(device, len(owner), RAGGED_PAGE, seed) for seed in range(layers)]
        sides = [(SIDES["bfloat16"][0](keys), SIDES["bfloat16"][1](values)) for keys, values in half]
        work.append((f"{name} heads, bfloat16", partial(_owned, query, sides, owner)))
    return work


def _owned(query: Tensor, sides: Sequence[tuple[Coded, Coded]], owner: Tensor, layer: int) -> Tensor:
    return attend_coded(query, *sides[layer], scaling=SCALE, owner=owner)[0]


def _blocks(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    half = [_states(device, 8, tokens, seed) for seed in range(layers)]
    work: list[tuple[str, _Work]] = []
    for name in ("bfloat16", "int4"):
        sides = [(SIDES[name][0](keys), SIDES[name][1](values)) for keys, values in half]
        # A program holds 32 query rows at most.
        for new in (1, 4, 8):
            work.append((f"{name}, {new} queries", partial(_ours, _query(device, 8, 4, new), sides)))
    return work


def _appending(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    half = [_states(device, 8, tokens, seed) for seed in range(layers)]
    sides = [(SIDES["bfloat16"][0](keys), SIDES["bfloat16"][1](values)) for keys, values in half]
    query, slot = _query(device, 8, 4, 1), torch.tensor([tokens // 2], device=device)
    new = half[0][0][:, :1].clone()
    return [
        ("attention, bfloat16", partial(_ours, query, sides)),
        ("a token into its slot", lambda i: [side.index_copy_(1, slot, new) for side in half[i]]),
    ]


def _packing(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    half = [_states(device, 8, tokens, seed)[0] for seed in range(layers)]
    return [
        ("a copy of the states", lambda i: half[i].clone()),
        ("int8 by token", lambda i: symmetric_codes(half[i], 8)),
        ("4 bits by token", lambda i: token_codes(half[i], 4, 64)),
        ("4 bits by channel", lambda i: channel_codes(half[i], 4, 64)),
        ("4 bits by channel, torch", lambda i: SIDES["kivi 4 bits"][0](half[i])),
    ]
