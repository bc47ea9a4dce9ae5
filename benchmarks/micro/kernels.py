"""Does attention read the small bytes, and nothing else? One layer's decode attention, against what a user has instead.

    python -m benchmarks.micro kernels [--contexts 8192,32768] [--rounds 11] [--cases attention,ragged] [--device cuda]

A decoded token must read each held byte once. So the floor comes first: a plain read of the bytes of a bfloat16 cache,
in the same rounds as everything else; and beside each time stands that of reading the side's own bytes. How far above
it a kernel lies is what the kernel is worth, on any machine. What a compressed cache is worth is its time over that of
our bfloat16 kernel, and not over a slow path of ours.

*attention* of one token, for *grouped heads* (32 query heads on 8 kv heads of 128) and *single heads* (32 on 32): our
kernel over bfloat16, int8, int4, KIVI in 4 and 2 bits. Beside them torch's attention as transformers calls it (with
`enable_gqa`), the same with the heads of a group folded into query rows, which is the best that torch has; our plain
form, which decodes first; and a step of transformers' `DynamicCache`, which copies the cache to append to it, and,
where their libraries are installed, of `QuantizedCache`.
*quest*: 2,048 tokens of pages chosen by their bounds, over reading everything.
*ragged* heads: lengths from a quarter to four times the mean, the same tokens in all, over the uniform cache.
*blocks* of several queries, as speculation asks them, over a single query.
*levels*: codes that stand for levels or points of a grid, and small floats in blocks of channels, over int4; and each
decoded first.
*appending* a token to a tail in place, over attention. *packing*: making codes, over a copy of the states.

Correctness comes before time: each side's answer is compared with attention in float64 over what it stores, and one
that is off gets no time. `timer` says how times are taken. With one thread other programs may use the other cores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.micro import cases
from benchmarks.micro.cases import SCALE, SIDES, SIZE, Kernels, coded, query_of, states
from benchmarks.micro.tables import Advance, Bench, Cell, Table, compared
from benchmarks.micro.timer import Side, time_in_turns
from kvtailor.attend.contract import AttentionContext, AttentionRequest
from kvtailor.attend.quest import Quest
from kvtailor.bench.measure.machine import read_bandwidth
from kvtailor.encode.indexed import Indexed
from kvtailor.hf.mask import LazyMask
from kvtailor.ops.dispatch import forced, quantiser, using
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded
from kvtailor.types import Layout, PlainSegment

__all__ = ["CASES", "bench"]

_ABOUT = """\
One layer's attention over stored bytes, alone: our kernels against torch's fused attention, decoding first, and a step
of transformers' caches. Divided by: our own bfloat16 kernel. Beside it: a plain read of as many bytes."""
# Lanes whose answer is compared.
_CHECKED = 8
_PAGE, _BUDGET = 16, 2048
_DECODED_FIRST = ("int4", "kivi 4 bits")
_FOLDS = {"sdpa, heads folded": True, "sdpa as transformers calls it": False}
_WARMUP = 2
CASES = ("attention", "quest", "ragged", "blocks", "levels", "appending", "packing")
# Makes the sides of a case from kernels, tokens and layers.
_Make = Callable[[Kernels, int, int], list[Side]]


def bench(
    *,
    contexts: Sequence[int] | None = None,
    rounds: int = 11,
    batches: Sequence[int] = (1,),
    only: Sequence[str] = (),
    device: torch.device,
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        contexts: tokens held; None: 8,192 and 32,768, on a GPU 4,096, 32,768 and 131,072.
        rounds: timed rounds.
        batches: rows, of `attention`.
        only: some of `CASES`; none: all of them.
        device: the kernels of this kind of device are timed.

    Raises:
        KvtailorError: there are no kernels for it here.
    """
    # On a GPU the kernels must be asked for, since they are not the default yet.
    which = "triton" if device.type == "cuda" else forced()
    with using(which):
        kernels = cases.kernels_of(device)
    bandwidth = read_bandwidth(device)
    cells = []
    for tokens in contexts or ((4096, 32768, 131072) if device.type == "cuda" else (8192, 32768)):
        for rows in batches if not only or "attention" in only else ():
            for title, heads, group in cases.HEADS:
                name = f"{title}, {tokens} tokens" + (f", {rows} rows" if rows > 1 else "")
                measure = partial(
                    _attention_table, kernels, which, name, rows * heads, group, tokens, rounds, bandwidth
                )
                # A side whose answer is wrong gets no samples; all others are counted before they are made.
                count = 1 + len(SIDES) + len(_DECODED_FIRST) + len(_FOLDS) + cases.stock_caches()
                cells.append(Cell(name=name, samples=(rounds + _WARMUP) * count, measure=measure))
        for case, (title, make, base, count) in _of_one_row(kernels).items():
            if not only or case in only:
                name = f"{title}, {tokens} tokens"
                measure = partial(_table, kernels, which, name, make, base, tokens, rounds, bandwidth)
                cells.append(Cell(name=name, samples=(rounds + _WARMUP) * count, measure=measure))
    return Bench(
        about=_ABOUT,
        machine=f"{kernels.name}; a plain read gives {bandwidth / 1e9:.1f} GB/s",
        cells=cells,
        found={"read_bandwidth": bandwidth, "variant": kernels.variant},
    )


@torch.no_grad()
def _attention_table(
    kernels: Kernels,
    which: str,
    name: str,
    lanes: int,
    group: int,
    tokens: int,
    rounds: int,
    bandwidth: float,
    advance: Advance,
) -> Table:
    floor = 2 * lanes * tokens * SIZE * kernels.dtype.itemsize
    layers = cases.layers_apart(floor)
    reason = _no_room(kernels.device, 5 * layers * floor)
    if reason is not None:
        return Table(lines=["", f"{name}: left out, {reason}"])
    with using(which):
        sides, notes = _attention(kernels, lanes, group, tokens, layers)
        return _timed(kernels, name, sides, "kvtailor bfloat16", layers, rounds, bandwidth, advance, notes)


@torch.no_grad()
def _table(
    kernels: Kernels,
    which: str,
    name: str,
    make: _Make,
    base: str,
    tokens: int,
    rounds: int,
    bandwidth: float,
    advance: Advance,
) -> Table:
    layers = cases.layers_apart(2 * 8 * tokens * SIZE * kernels.dtype.itemsize)
    with using(which):
        return _timed(kernels, name, make(kernels, tokens, layers), base, layers, rounds, bandwidth, advance)


def _timed(
    kernels: Kernels,
    name: str,
    sides: Sequence[Side],
    base: str,
    layers: int,
    rounds: int,
    bandwidth: float,
    advance: Advance,
    notes: Sequence[str] = (),
) -> Table:
    if kernels.device.type == "cuda":
        # What no graph can hold is timed from the host, and says so.
        sides = [side if side.recorded else replace(side, name=f"{side.name}, not recorded") for side in sides]
    results = time_in_turns(sides, rounds, warmup=_WARMUP, layers=layers, device=kernels.device, advance=advance)
    lines, rows = compared(name, results, base, bandwidth=bandwidth, notes=notes)
    return Table(lines=lines, rows={name: rows})


def _no_room(device: torch.device, size: int) -> str | None:
    """Why a point is left out on a GPU; None where it fits."""
    if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0]:
        return f"its layers take {size / 2**30:.0f} GiB and less is free"
    return None


def _attention(kernels: Kernels, lanes: int, group: int, tokens: int, layers: int) -> tuple[list[Side], list[str]]:
    """Sides that gave the right answer, and a line about each that was compared."""
    half = states(kernels.device, lanes, tokens, layers, kernels.dtype)
    query = query_of(kernels, lanes, group, 1)
    plain = sum(each.nbytes for each in half[0])
    # Ones in float32: sums of 16-bit floats, or of random bits that may be denormal, take longer than reading them.
    probe = torch.ones((layers, plain // 4), dtype=torch.float32, device=kernels.device)
    sides = [
        Side(name="a plain read of the bfloat16 bytes", run=lambda i: probe[i].sum(), recorded=True, bytes_read=plain)
    ]
    notes: list[str] = []
    some = torch.arange(min(_CHECKED, lanes), device=kernels.device)

    def add(name: str, run: cases.Attend, keys: Tensor, values: Tensor, size: int, *, recorded: bool = True) -> None:
        found = run(0).reshape(lanes, group, 1, SIZE)[some]
        right, line = cases.verdict(name, query[some], found, keys, values)
        notes.append(line)
        if right:
            sides.append(Side(name=name, run=run, recorded=recorded, bytes_read=size))

    for name in SIDES:
        stored = coded(name, half)
        exact = [cases.exact_side(side.rows(some)) for side in stored[0]]
        size = cases.bytes_of(stored)
        add(f"kvtailor {name}", kernels.ours(query, stored), exact[0], exact[1], size)
        if name in _DECODED_FIRST:
            add(f"decoded first, {name}", kernels.decoded_first(query, stored), exact[0], exact[1], size)
    for name, fold in _FOLDS.items():
        run = cases.torch_attention(query, half, fold=fold)
        add(name, run, half[0][0][some], half[0][1][some], plain)
    # A step of transformers' caches allocates, so that no graph can hold it.
    sides += [Side(name=name, run=step) for name, step in cases.stock_steps(query, half, notes)]
    return sides, notes


def _quest(kernels: Kernels, tokens: int, layers: int) -> list[Side]:
    """Of 8 kv heads: Quest by its bounds, chosen pages alone where a kernel reads them in place, and everything."""
    half = states(kernels.device, 8, tokens, layers, kernels.dtype)
    query = query_of(kernels, 8, 4, 1)
    sides = coded("bfloat16", half)
    everything = Side(
        name="everything, bfloat16", run=kernels.ours(query, sides), recorded=True, bytes_read=cases.bytes_of(sides)
    )
    found = [everything]
    read_pages = kernels.attend_pages
    if read_pages is not None:
        count = min(tokens, _BUDGET) // _PAGE
        pages = torch.stack([torch.randperm(tokens // _PAGE)[:count] for _ in range(8)]).to(kernels.device, torch.int32)

        def chosen(layer: int) -> Tensor:
            return read_pages(AttentionInputs(query, *sides[layer], scaling=SCALE), pages, _PAGE)[0]

        found.append(Side(name=f"{_BUDGET} tokens of pages", run=chosen, recorded=True))
    layout = Layout(rows=1, heads=8, size=tokens, start=0)
    newest = Layout(rows=1, heads=8, size=1, start=tokens)
    method, heads = Quest(tokens=_BUDGET, dense_layers=0), query.reshape(1, 32, 1, SIZE)
    requests = []
    for keys, values in half:
        tail = PlainSegment(layout=newest, keys=keys[:, :1].clone(), values=values[:, :1].clone())
        requests.append(
            AttentionRequest(
                query=heads,
                parts=[Indexed(page=_PAGE).encode(layout, keys, values), tail],
                visible=LazyMask.causal(1, 1, tokens, kernels.device),
                scaling=SCALE,
                context=AttentionContext(layer=1, layers=2),
            )
        )
    found.append(Side(name=f"quest, {_BUDGET} tokens", run=lambda i: method.attend(requests[i]).output))
    if kernels.on_triton:

        def copied(layer: int) -> Tensor:
            with using("reference"):
                return method.attend(requests[layer]).output

        found.append(Side(name=f"quest, {_BUDGET} tokens, copied by torch", run=copied))
    return found


def _ragged(kernels: Kernels, tokens: int, layers: int) -> list[Side]:
    """Pages of 256 slots: the same tokens in all, each head its own number of them, and all the same number."""
    query, found = query_of(kernels, 8, 4, 1), []
    for name, owner in cases.ragged_owners(8, tokens):
        sides = coded("bfloat16", states(kernels.device, len(owner), cases.RAGGED_PAGE, layers, kernels.dtype))
        run = kernels.ours(query, sides, owner=owner.to(kernels.device))
        found.append(Side(name=f"{name} heads, bfloat16", run=run, recorded=True, bytes_read=cases.bytes_of(sides)))
    return found


def _blocks(kernels: Kernels, tokens: int, layers: int) -> list[Side]:
    half, found = states(kernels.device, 8, tokens, layers, kernels.dtype), []
    for name in ("bfloat16", "int4"):
        sides = coded(name, half)
        for new in kernels.blocks:
            run = kernels.ours(query_of(kernels, 8, 4, new), sides)
            found.append(Side(name=f"{name}, {new} queries", run=run, recorded=True, bytes_read=cases.bytes_of(sides)))
    return found


def _levels(kernels: Kernels, tokens: int, layers: int) -> list[Side]:
    """Those whose answer is right; no kernel of a CPU reads grids."""
    half, query = states(kernels.device, 8, tokens, layers, kernels.dtype), query_of(kernels, 8, 4, 1)
    some, found = torch.arange(_CHECKED, device=kernels.device), []
    for name in ("int4", *cases.LEVELS):
        if name == cases.GRID and not kernels.on_triton:
            continue
        sides = coded(name, half)
        run, size = kernels.ours(query, sides), cases.bytes_of(sides)
        exact = [cases.exact_side(side.rows(some)) for side in sides[0]]
        right, line = cases.verdict(name, query[some], run(0)[some], exact[0], exact[1])
        if not right:
            warnings.warn(line.strip(), stacklevel=2)
            continue
        found.append(Side(name=name, run=run, recorded=True, bytes_read=size))
        if name in cases.LEVELS:
            first = kernels.decoded_first(query, sides)
            found.append(Side(name=f"decoded first, {name}", run=first, recorded=True, bytes_read=size))
    return found


def _appending(kernels: Kernels, tokens: int, layers: int) -> list[Side]:
    half = states(kernels.device, 8, tokens, layers, kernels.dtype)
    sides, slot = coded("bfloat16", half), torch.tensor([tokens // 2], device=kernels.device)
    new = half[0][0][:, :1].clone()
    attention = kernels.ours(query_of(kernels, 8, 4, 1), sides)
    return [
        Side(name="attention, bfloat16", run=attention, recorded=True, bytes_read=cases.bytes_of(sides)),
        Side(
            name="a token into its slot",
            run=lambda i: [side.index_copy_(1, slot, new) for side in half[i]],
            recorded=True,
        ),
    ]


def _packing(kernels: Kernels, tokens: int, layers: int) -> list[Side]:
    """The keys of a layer, made into codes; by the kernels, and the codes of channels also by torch."""
    half = [keys for keys, _ in states(kernels.device, 8, tokens, layers, kernels.dtype)]
    made = quantiser(half[0])
    work: dict[str, Callable[[int], Tensor | Coded]] = {
        "a copy of the states": lambda i: half[i].clone(),
        "int8 by token": lambda i: made.symmetric(half[i], 8),
        "4 bits by token": lambda i: made.tokens(half[i], 4, cases.GROUP),
        "4 bits by channel": lambda i: made.channels(half[i], 4, cases.GROUP),
        "4 bits by channel, torch": lambda i: SIDES["kivi 4 bits"][0](half[i]),
    }
    return [
        Side(name=name, run=run, recorded=True, bytes_read=half[0].nbytes, cache_bytes=_bytes_made(run(0)))
        for name, run in work.items()
    ]


def _bytes_made(made: Tensor | Coded) -> int:
    """Bytes of a copy, or of codes with their steps and minima."""
    return made.nbytes if isinstance(made, Tensor) else sum(each.nbytes for each in made.tensors().values())


def _of_one_row(kernels: Kernels) -> dict[str, tuple[str, _Make, str, int]]:
    """Title, what makes the sides, the side that the others are divided by, and how many; 8 kv heads of 4 queries."""
    return {
        "quest": ("Quest's pages", _quest, "everything, bfloat16", 4 if kernels.on_triton else 2),
        "ragged": ("ragged heads", _ragged, "uniform heads, bfloat16", 2),
        "blocks": ("query blocks", _blocks, "bfloat16, 1 queries", 2 * len(kernels.blocks)),
        "levels": ("levels and small floats", _levels, "int4", 11 if kernels.on_triton else 9),
        "appending": ("appending", _appending, "attention, bfloat16", 2),
        "packing": ("packing", _packing, "a copy of the states", 5),
    }
