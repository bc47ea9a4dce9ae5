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
4. *Query blocks* of 4 and 8 over one query. 5. *Appending* a token to a tail in place.
6. *Packing*: making codes, over a copy of the states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtailor.attend.contract import AttentionContext, AttentionRequest
from kvtailor.attend.quest import Quest
from kvtailor.bench.micro.attention_contestants import (
    APART,
    HEADS,
    RAGGED_PAGE,
    SCALE,
    SIDES,
    SIZE,
    coded,
    exact_side,
    is_right,
    ragged_owners,
    stock_steps,
    torch_attention,
)
from kvtailor.bench.micro.decode import Measured, report
from kvtailor.encode.indexed import Indexed
from kvtailor.hf.graphs.replay import captured
from kvtailor.hf.mask import LazyMask
from kvtailor.ops.dispatch import using
from kvtailor.ops.segments.coded import Coded
from kvtailor.ops.triton.attend import attend_coded, attend_pages
from kvtailor.ops.triton.quantise import channel_codes, symmetric_codes, token_codes
from kvtailor.types import Layout, PlainSegment

__all__ = ["measure", "samples"]

# Lanes whose answer is compared.
_CHECKED = 8
_PAGE, _BUDGET = 16, 2048
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
    replay = captured(everything)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replayed() -> float:
        begin.record()
        replay()
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
                for title, heads, group in HEADS:
                    where = f"{title}, {tokens} tokens, {rows} rows"
                    floor = 2 * rows * heads * tokens * SIZE * 2
                    layers = max(1, min(8, APART // floor + 1))
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
                layers = max(1, min(8, APART // (2 * 8 * tokens * SIZE * 2) + 1))
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
    for name in SIDES:
        sides = coded(name, half)
        some = torch.arange(min(_CHECKED, lanes), device=device)
        exact = [exact_side(side.rows(some)) for side in sides[0]]
        if is_right(f"kvtailor {name}", query[some], _ours(query, sides, 0)[some], *exact):
            work.append((f"kvtailor {name}", partial(_ours, query, sides)))
        if name in ("int8", "kivi 4 bits"):
            work.append((f"dequantised first, {name}", partial(_dequantised, query, sides)))
    for name, fold in (("sdpa as transformers calls it", False), ("sdpa, heads folded", True)):
        work.append((name, torch_attention(query, half, fold=fold)))
    steps = stock_steps(query, layers, lambda i: (half[i][0][None], half[i][1][None]))
    return work + [(f"{name}, not recorded", step) for name, step in steps]


def _ours(query: Tensor, sides: Sequence[tuple[Coded, Coded]], layer: int, *, owner: Tensor | None = None) -> Tensor:
    return attend_coded(query, *sides[layer], scaling=SCALE, owner=owner)[0]


def _dequantised(query: Tensor, sides: Sequence[tuple[Coded, Coded]], layer: int) -> Tensor:
    keys, values = (side.decode() for side in sides[layer])
    return torch_attention(query, [(keys, values)], fold=True)(0)


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
    method, facts = Quest(tokens=_BUDGET, dense_layers=0), AttentionContext(layer=1, layers=2)
    visible = LazyMask.causal(1, 1, tokens, device)
    count = min(tokens, _BUDGET) // _PAGE
    pages = torch.stack([torch.randperm(tokens // _PAGE)[:count] for _ in range(8)]).to(device, torch.int32)
    sides = coded("bfloat16", half)
    heads = query.reshape(1, 32, 1, SIZE)
    return [
        ("everything, bfloat16", partial(_ours, query, sides)),
        (f"{_BUDGET} tokens of pages", lambda i: attend_pages(query, *sides[i], pages, _PAGE, scaling=SCALE)),
        (
            f"quest, {_BUDGET} tokens, not recorded",
            lambda i: method.attend(
                AttentionRequest(query=heads, parts=held[i], visible=visible, scaling=SCALE, context=facts)
            ),
        ),
    ]


def _ragged(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    query = _query(device, 8, 4, 1)
    work: list[tuple[str, _Work]] = []
    for name, owner in ragged_owners(8, tokens):
        sides = coded("bfloat16", [_states(device, len(owner), RAGGED_PAGE, seed) for seed in range(layers)])
        work.append((f"{name} heads, bfloat16", partial(_ours, query, sides, owner=owner.to(device))))
    return work


def _blocks(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    half = [_states(device, 8, tokens, seed) for seed in range(layers)]
    work: list[tuple[str, _Work]] = []
    for name in ("bfloat16", "int4"):
        sides = coded(name, half)
        # A program holds 32 query rows at most.
        for new in (1, 4, 8):
            work.append((f"{name}, {new} queries", partial(_ours, _query(device, 8, 4, new), sides)))
    return work


def _appending(device: torch.device, tokens: int, layers: int) -> list[tuple[str, _Work]]:
    half = [_states(device, 8, tokens, seed) for seed in range(layers)]
    sides = coded("bfloat16", half)
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
