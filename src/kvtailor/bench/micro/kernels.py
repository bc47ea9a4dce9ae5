"""Does attention read the small bytes, and nothing else? One layer's decode attention, against what a user has instead.

    kvtailor bench kernels [--contexts 8192,32768] [--rounds 11] [--device cuda [--batches 1,8]]

A decoded token must read each held byte once. So the floor comes first: a plain read of the bytes of a bfloat16 cache,
in the same rounds as everything else. How far above it a kernel lies is what the kernel is worth, on any machine. What
a compressed cache is worth is its time over that of our bfloat16 kernel, and not over a slow path of ours.

1. *Grouped heads* (32 query heads on 8 kv heads of 128) and *single heads* (32 on 32): our kernel over bfloat16, int8,
   int4, KIVI in 4 and 2 bits. Beside them torch's attention as transformers calls it (with `enable_gqa`), the same with
   the heads of a group folded into query rows, which is the best that torch has; our plain form, which decodes first;
   and a step of transformers' `DynamicCache`, which copies the cache to append to it, and, where their libraries are
   installed, of `QuantizedCache`.
2. *Ragged heads*: lengths from a quarter to four times the mean, the same tokens in all, over the uniform cache.
3. *Query blocks* of 4 and 16, as speculation asks them, over a single query.

Correctness comes before time: each contestant's answer is compared with attention in float64 over what it stores, and
one that is off gets no time. Every round runs everything once, layers in turns, so that no layer is still in a cache of
the processor. Samples that other programs disturbed are left out and counted; with one thread they may use the other
cores. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.measure.machine import describe, read_bandwidth
from kvtailor.bench.micro.attention_contestants import (
    APART,
    HEADS,
    RAGGED_PAGE,
    SCALE,
    SIDES,
    SIZE,
    Attend,
    coded,
    exact_side,
    is_right,
    ragged_owners,
    stock_steps,
    torch_attention,
)
from kvtailor.bench.micro.decode import Measured, interleaved, report
from kvtailor.ops.attention.lanes import Lanes, joint
from kvtailor.ops.cpu.attention import attend_coded
from kvtailor.ops.cpu.library import library, why_none
from kvtailor.ops.segments.coded import Coded
from kvtailor.ops.triton.installed import missing

__all__ = ["main", "measure"]


@dataclass
class _Contestant:
    """One way to attend: over layer i gives (rows, ...) outputs; `keys` and `values` are what layer 0 stands for."""

    name: str
    attend: Attend
    keys: Tensor
    values: Tensor


def _plain(query: Tensor, keys: Coded, values: Coded) -> Tensor:
    return joint(query.to(torch.bfloat16), [Lanes(keys=keys.decode(), values=values.decode())], SCALE)[0]


def _states(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Random keys and values (*shape, d) in bfloat16."""
    keys, values = (torch.randn((*shape, SIZE), generator=generator).bfloat16() for _ in range(2))
    return keys, values


def _ours(query: Tensor, sides: Sequence[tuple[Coded, Coded]], owner: Tensor | None = None) -> Attend:
    return lambda layer: attend_coded(query, *sides[layer], scaling=SCALE, owner=owner)[0]


def _contestants(query: Tensor, tokens: int, layers: int, generator: torch.Generator) -> list[_Contestant]:
    half = [_states(generator, query.shape[0], tokens) for _ in range(layers)]
    found = []
    for name in SIDES:
        sides = coded(name, half)
        exact = [exact_side(side) for side in sides[0]]
        found.append(_Contestant(f"kvtailor {name}", _ours(query, sides), *exact))
        if name in ("int4", "kivi 4 bits"):

            def plain(layer: int, sides: list[tuple[Coded, Coded]] = sides) -> Tensor:
                return _plain(query, *sides[layer])

            found.append(_Contestant(f"plain form, {name}", plain, *exact))
    for name, fold in (("sdpa, heads folded", True), ("sdpa as transformers calls it", False)):
        found.append(_Contestant(name, torch_attention(query, half, fold=fold), *half[0]))
    return found


def _stock(query: Tensor, tokens: int, layers: int, generator: torch.Generator) -> list[tuple[str, Attend]]:
    return stock_steps(query, layers, lambda _: _states(generator, 1, query.shape[0], tokens))


def _ragged(heads: int, group: int, tokens: int, layers: int) -> list[tuple[str, Attend]]:
    """Pages of 256 slots: the same tokens in all, each head its own number of them, and all the same number."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn((heads, group, 1, SIZE), generator=generator)
    found = []
    for name, owner in ragged_owners(heads, tokens):
        half = [_states(generator, len(owner), RAGGED_PAGE) for _ in range(layers)]
        found.append((f"{name} heads, bfloat16", _ours(query, coded("bfloat16", half), owner=owner)))
    return found


def _blocks(heads: int, group: int, tokens: int, layers: int) -> list[tuple[str, Attend]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for name in ("bfloat16", "int4"):
        sides = coded(name, [_states(generator, heads, tokens) for _ in range(layers)])
        for new in (1, 4, 16):
            query = torch.randn((heads, group, new, SIZE), generator=generator)
            found.append((f"{name}, {new} queries", _ours(query, sides)))
    return found


def _timed(work: Sequence[tuple[str, Attend]], layers: int, rounds: int, floor_bytes: int) -> list[Measured]:
    """Each contestant once a round, every round on the next layer; a plain read of `floor_bytes` first."""
    turn = {"layer": 0}
    probe = torch.ones((layers, floor_bytes // 4), dtype=torch.float32)

    def turned(attend: Attend) -> Callable[[], object]:
        return lambda: attend(turn["layer"] % layers)

    def read() -> object:
        turn["layer"] += 1
        return probe[turn["layer"] % layers].sum().item()

    measured: list[tuple[Measured, Callable[[], object]]] = [(Measured("a plain read of the bfloat16 bytes"), read)]
    measured += [(Measured(name), turned(attend)) for name, attend in work]
    interleaved(measured, rounds, warmup=2)
    return [each for each, _ in measured]


@torch.no_grad()
def measure(contexts: Sequence[int], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Prints the tables, and gives them by title."""
    tables = {}
    for tokens in contexts:
        for title, heads, group in HEADS:
            floor = 2 * heads * tokens * SIZE * 2
            layers = max(1, min(8, APART // floor))
            generator = torch.Generator().manual_seed(3)
            query = torch.randn((heads, group, 1, SIZE), generator=generator)
            work = [
                (each.name, each.attend)
                for each in _contestants(query, tokens, layers, generator)
                if is_right(each.name, query, each.attend(0), each.keys, each.values)
            ]
            work += _stock(query, tokens, layers, generator)
            results = _timed(work, layers, rounds, floor)
            tables[f"{title}, {tokens} tokens"] = report(f"{title}, {tokens} tokens", results, "kvtailor bfloat16")
        layers = max(1, min(8, APART // (2 * 8 * tokens * SIZE * 2)))
        for title, made, base in (
            ("ragged heads", _ragged(8, 4, tokens, layers), "uniform heads, bfloat16"),
            ("query blocks", _blocks(8, 4, tokens, layers), "bfloat16, 1 queries"),
        ):
            results = _timed(made, layers, rounds, 2 * 8 * tokens * SIZE * 2)
            tables[f"{title}, {tokens} tokens"] = report(f"{title}, {tokens} tokens", results, base)
    return tables


def main(
    contexts: Sequence[int] | None = None,
    rounds: int = 11,
    *,
    device: torch.device | str = "cpu",
    batches: Sequence[int] = (1,),
) -> None:
    """Runs the bench.

    Args:
        contexts: tokens held; None: 8,192 and 32,768, on a GPU 4,096, 32,768 and 131,072.
        rounds: timed rounds.
        device: the kernels of this kind of device are timed.
        batches: rows, on a GPU.
    """
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    built = None if on_gpu else library()
    reason = missing() if on_gpu else why_none() if built is None else None
    if reason is not None:
        sys.exit(f"{reason}, and this bench is about its kernels")
    bandwidth = read_bandwidth(where)
    what = torch.cuda.get_device_name(where) if built is None else f"{built.variant}, {torch.get_num_threads()} threads"
    print(f"{what}; a plain read gives {bandwidth / 1e9:.1f} GB/s")
    if on_gpu:
        from kvtailor.bench.micro import gpu_kernels

        tables = gpu_kernels.measure(where, contexts or (4096, 32768, 131072), batches, rounds)
    else:
        tables = measure(contexts or (8192, 32768), rounds)
    told = {"machine": describe(device=where), "read_bandwidth": bandwidth, "tables": tables}
    print(json.dumps({**told, "variant": "Triton" if built is None else built.variant}))
