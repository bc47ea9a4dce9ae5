"""What does the host add to a decoded token? A model with almost no arithmetic, every preset, against DynamicCache.

    python -m benchmarks.micro host [--plans "full; kivi4"] [--profile [PLAN]] [--threads 1] [--device cuda]

The model is `random-llama-narrow`: 16 layers, hidden size 64, untrained. Its products are so small that a token takes
the time of Python and of launching operations alone, on a CPU and on a GPU. A token on transformers' `DynamicCache`
with sdpa, which every model has without us, is the base. What a plan takes above it, divided by the layers, is what our
machinery costs the host for each layer. It is the same for a model of any width, which waits for it wherever attention
is not the bottleneck.

Each timed token follows one of the same side that is not timed. A token after another side's takes 10 to 15 us a layer
longer here, on whichever side, since code and caches are cold; who decodes does so with one cache.

Plans are all presets, and those of `PLANS`. A plan that evicts has a budget of half of the prompt, so that the prompt
is cut. A preset that cannot be run on this model is named below the table, with the reason. All sides take turns, token
by token.

`profile` adds, below the table, where the time of a plan's token goes by function (`benchmarks.micro.by_function`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.micro.by_function import functions_of, told
from benchmarks.micro.cases import VOCABULARY, random_of
from benchmarks.micro.tables import Advance, Bench, Cell, Table, compared
from benchmarks.micro.timer import Side, time_in_turns
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import Neighbours
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.hf.run.prefill import prefill
from kvtailor.hf.run.stock import dynamic_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.plan.registry import presets

__all__ = ["BASE", "EACH", "MODEL", "PLANS", "PROMPT", "Prepared", "bench", "plans", "prepared"]

_ABOUT = """\
A decoded token of a model with almost no arithmetic: what is left is the host, Python and launched operations.
Divided by: DynamicCache with sdpa, what transformers runs by itself. us a layer: microseconds above it, by layers."""
BASE = "DynamicCache + sdpa"
MODEL = "random-llama-narrow"
PROMPT = 256
_BUDGET = PROMPT // 2
PLANS = (
    f"snapkv @ tokens={_BUDGET}",
    f"snapkv + adakv @ tokens={_BUDGET}",
    f"streaming @ tokens={_BUDGET}, slack=16",
    f"h2o @ tokens={_BUDGET}, slack=16",
    "vector(bits=8)",
    "kivi(bits=4, group=32, recent=32)",
    f"snapkv + kivi(bits=4, group=32, recent=32) @ tokens={_BUDGET}",
    "quest(tokens=64) + indexed",
)
"""Beside the presets: eviction alone, codes alone, both; and reading a part, which the preset `quest` does of longer
prompts only."""
EACH = "each"
"""In place of a plan to profile: all of the table."""
_WARMUP, _PROFILED, _BEFORE = 5, 20, 1


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Caches that have read the prompt.

    Attributes:
        sides: a token of each, the base first.
        layers: of the model.
        refused: plans that cannot be run on it, with the reason.
    """

    sides: list[Side]
    layers: int
    refused: dict[str, str] = field(default_factory=dict)


def plans() -> tuple[str, ...]:
    """Return every preset as a plan whose budget is below the prompt, and the plans of `PLANS`."""
    named = [f"{name} @ tokens={_BUDGET}" if Plan.parse(_bound(name)).evicts else name for name in presets()]
    return (*named, *PLANS)


def _bound(preset: str) -> str:
    """A preset with the budget that its file suggests, where it suggests one."""
    budget = presets()[preset].budget
    return f"{preset} @ {budget}" if budget else preset


def bench(
    *, plans: Sequence[str], rounds: int = 50, profile: str | None = None, device: torch.device, model: str = MODEL
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        plans: the sides beside the base.
        rounds: timed tokens of each side.
        profile: one of `plans`, or `EACH`, whose time is shown by function; None: no profile.
        device: of the model.
        model: a name in `hf.model.config.RANDOM_SHAPES`.

    Raises:
        PlanError: a plan cannot be read.
        UnknownName: the plan to profile is none of the table.
    """
    for plan in plans:
        Plan.parse(plan)
    if profile not in (None, EACH, *plans):
        raise UnknownName("plan of this table", str(profile), plans)
    ready = prepared(tuple(dict.fromkeys(plans)), device, model)
    cells = [
        Cell(
            name=f"host, {len(ready.sides)} sides",
            samples=(rounds + _WARMUP) * len(ready.sides),
            measure=partial(_table, ready, rounds, model, device),
        )
    ]
    base, *ours = ready.sides
    profiled = [side for side in ours if profile in (EACH, side.name)] if profile else []
    if profile and not profiled:
        raise KvtailorError(f"asked for the profile of {profile}, which cannot be run: {ready.refused}")
    if profiled:
        cells.append(
            Cell(
                name="time by function",
                samples=_PROFILED * (1 + len(profiled)),
                measure=partial(_profile, base, profiled, ready.layers),
            )
        )
    return Bench(about=_ABOUT, machine=_machine(device), cells=cells, found={"refused": ready.refused})


def _machine(device: torch.device) -> str:
    """Where it runs; the threads too, since one of several that waits for others is what short operations feel."""
    threads = torch.get_num_threads()
    load = f", load average {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""
    where = f" and {torch.cuda.get_device_name(device)}" if device.type == "cuda" else f" on {device}"
    return f"{threads} thread{'s' if threads > 1 else ''} of {os.cpu_count()} cores{where}{load}"


@torch.no_grad()
def prepared(plans: Sequence[str], device: torch.device, name: str = MODEL) -> Prepared:
    """Return caches of some plans that have read the prompt and one token.

    Args:
        plans: each of which gets one.
        device: of the model.
        name: in `hf.model.config.RANDOM_SHAPES`.
    """
    # Two models: ours has its attention switched as long as it has a cache of ours.
    model, stock = (random_of(name, torch.float32, device) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (1, PROMPT), generator=generator).to(device)
    token = torch.tensor([[7]], device=device)
    theirs = dynamic_cache(stock)
    stock(ids, **hand_cache(theirs), logits_to_keep=1)
    ready = Prepared(sides=[_side(BASE, stock, token, theirs)], layers=model.config.num_hidden_layers)
    for plan in plans:
        try:
            cache = prefill(model, ids, plan=plan)
            model(token, **hand_cache(cache))
        except KvtailorError as refusal:
            ready.refused[plan] = str(refusal)
            continue
        ready.sides.append(_side(plan, model, token, cache))
    return ready


def _side(name: str, model: Any, token: Tensor, cache: Any) -> Side:
    handed = hand_cache(cache)
    run: Callable[[int], object] = lambda _: model(token, **handed)  # noqa: E731
    return Side(name=name, run=run, cache_bytes=bytes_of(cache))


@torch.no_grad()
def _table(ready: Prepared, rounds: int, model: str, device: torch.device, advance: Advance) -> Table:
    whole = Neighbours()
    results = time_in_turns(ready.sides, rounds, warmup=_WARMUP, device=device, before=_BEFORE, advance=advance)
    title = f"host, {model}, {ready.layers} layers, {PROMPT} tokens of context"
    lines, rows = compared(title, results, BASE, layers=ready.layers)
    # A token takes less time than the system's clock of used processor time can tell, the whole table does not.
    busy = whole.disturbed() if whole.metered else None
    if busy:
        lines.append("  other programs took processor time that the table needed: these times are too long")
    lines += [f"  not here: {plan}: {' '.join(reason.split())}" for plan, reason in ready.refused.items()]
    return Table(lines=lines, rows={"host": rows, "host disturbed": busy})


@torch.no_grad()
def _profile(base: Side, sides: Sequence[Side], layers: int, advance: Advance) -> Table:
    stock = functions_of(base, _PROFILED, advance)
    lines: list[str] = []
    rows: dict[str, Any] = {}
    for side in sides:
        more, rows[f"profile {side.name}"] = told(
            side.name, functions_of(side, _PROFILED, advance), stock, tokens=_PROFILED, layers=layers
        )
        lines += more
    return Table(lines=lines, rows=rows)
