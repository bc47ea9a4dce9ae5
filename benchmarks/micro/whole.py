"""What does a plan bring in a whole model? A decoded token and a prompt, with CUDA graphs and without.

    python -m benchmarks.micro whole --model random-llama3-8b --contexts 8192 --batches 1 --device cuda

`kernels` times one layer's attention alone, `decode` a small model whose every step the host launches. Here the model
has real widths and no trained weights, and a side is a plan under one implementation (`ops.dispatch`): "reference", the
plain forms of torch; "triton", the kernels of GPUs; "auto", what runs unless another is selected. On a GPU each of
them stands there twice, launched by the host and replayed as CUDA graphs, unless one of both is left out. `full`
replayed is the side to beat: it has all tokens in memory that was reserved before, and no host in the way.
`DynamicCache` with sdpa, which every user has, is beside it.

All sides take turns in one process. A sample is a run of tokens, 128 unless told otherwise, so that what recording a
graph and encoding a block take is in the times. The context is written into the caches directly. Where a plan evicts or
encodes, 64 tokens follow it through the model, after which it acts as after a prompt.

A prompt is timed with all that scoring, evicting and encoding take. Beside it stands the most memory of the device that
one prompt took above what was there before; null where the device does not count it.

A side for which there is no room is left out and named, as is one that cannot be recorded, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.micro.cases import VOCABULARY, fill_at_random, random_of
from benchmarks.micro.tables import Advance, Bench, Cell, Table, compared
from benchmarks.micro.timer import Measured, Side, time_in_turns
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import read_bandwidth
from kvtailor.errors import KvtailorError, UnsupportedModel
from kvtailor.hf.graphs.replaying import Replays
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.run.stock import dynamic_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.dispatch import using
from kvtailor.ops.triton_launch import interpreting, missing
from kvtailor.plan import Plan
from kvtailor.presets import FULL

__all__ = ["GRAPHS", "OWN", "PLANS", "bench", "side_name"]

_ABOUT = """\
A decoded token and a prompt of a whole random model, by plan and implementation, with CUDA graphs and without, against
transformers' DynamicCache. Divided by: our `full` in plain torch, replayed where graphs are."""
OWN = "DynamicCache + sdpa"
"""The side that every user has."""
PLANS = (
    FULL,
    "vector(bits=8)",
    "vector(bits=4)",
    "kivi(bits=4, group=64, recent=128)",
    "snapkv @ keep=0.25",
)
GRAPHS = {"none": (False,), "both": (False, True), "only": (True,)}
"""What is timed of each plan: False is launched by the host, True is replayed."""
_QUESTION = 64
_WARMUP = 1


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What all tables of a run share; see `bench` for the attributes.

    Attributes:
        ways: False: steps are launched by the host; True: they are replayed.
    """

    model: str
    dtype: torch.dtype
    device: torch.device
    plans: Sequence[str]
    implementations: Sequence[str]
    ways: Sequence[bool]
    tokens: int
    rounds: int
    prefill_rounds: int
    own: bool
    bandwidth: float
    built: dict[str, Any] = field(default_factory=dict)

    def models(self) -> tuple[Any, Any]:
        """Return the model for our caches, and one for transformers' own: ours has its attention switched."""
        for name in ("ours", *(["stock"] if self.own else [])):
            if name not in self.built:
                self.built[name] = random_of(self.model, self.dtype, self.device)
        return self.built["ours"], self.built.get("stock")


def side_name(plan: str, implementation: str, *, graphs: bool = False) -> str:
    """Return the name of a side in the tables."""
    return f"{plan}, {implementation}" + (", graphs" if graphs else "")


def bench(
    *,
    model: str,
    dtype: str,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    prefills: Sequence[int] = (),
    plans: Sequence[str] = PLANS,
    implementations: Sequence[str] | None = None,
    graphs: str | None = None,
    tokens: int = 128,
    rounds: int = 5,
    prefill_rounds: int = 3,
    own: bool = True,
    device: torch.device,
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        model: a name in `hf.model.config.RANDOM_SHAPES`.
        dtype: of model and cache.
        contexts: tokens held when tokens are decoded.
        batches: rows of the decoded tokens; prompts have one.
        prefills: tokens of prompts.
        plans: the sides; `full` is always there.
        implementations: of "auto", "reference" and "triton"; None: the last two on a GPU, elsewhere "auto".
        graphs: "none", "both" or "only": whether steps are launched by the host, replayed, or each of them; None: both
            on a GPU, elsewhere none.
        tokens: of a sample.
        rounds, prefill_rounds: timed rounds.
        own: transformers' `DynamicCache` is a side, which takes a model of its own.
        device: of the model.

    Raises:
        PlanError: a plan cannot be read.
        KvtailorError: an implementation cannot run here.
    """
    for plan in plans:
        Plan.parse(plan)
    which = tuple(implementations or (("reference", "triton") if device.type == "cuda" else ("auto",)))
    reason = missing() or (None if device.type == "cuda" or interpreting() else f"the device is {device}")
    if "triton" in which and reason is not None:
        raise KvtailorError(f"asked for Triton's kernels, which cannot run: {reason}; leave out triton")
    setting = _Setting(
        model=model,
        dtype=getattr(torch, dtype),
        device=device,
        plans=tuple(dict.fromkeys((FULL, *plans))),
        implementations=which,
        ways=GRAPHS[graphs or ("both" if device.type == "cuda" else "none")],
        tokens=tokens,
        rounds=rounds,
        prefill_rounds=prefill_rounds,
        own=own,
        bandwidth=read_bandwidth(device),
    )
    sides = len(setting.plans) * len(which)
    cells = [
        Cell(
            name=f"decode, {model}, {dtype}, {context} tokens, {rows} rows",
            samples=(rounds + _WARMUP) * (sides * len(setting.ways) + own),
            measure=partial(_decode_table, setting, context, rows),
        )
        for context in contexts
        for rows in batches
    ]
    cells += [
        Cell(
            name=f"prompt, {model}, {dtype}, {context} tokens",
            samples=(prefill_rounds + _WARMUP) * (sides + own),
            measure=partial(_prompt_table, setting, context),
        )
        for context in prefills
    ]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return Bench(
        about=_ABOUT,
        machine=f"{where}; a plain read gives {setting.bandwidth / 1e9:.1f} GB/s",
        cells=cells,
        found={"read_bandwidth": setting.bandwidth, "tokens_of_a_sample": tokens, "device": str(device)},
    )


def _ready(setting: _Setting, model: Any, plan: str, rows: int, context: int) -> Any:
    """A cache of a plan that holds the context, after what the plan does with it."""
    cache = cache_for(model, plan)
    fill_at_random(cache, model, rows, context)
    shape = (rows, 1 if plan == FULL else _QUESTION)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(2)).to(setting.device)
    model(ids, **hand_cache(cache), logits_to_keep=1)
    return cache


@torch.no_grad()
def _decode_table(setting: _Setting, context: int, rows: int, advance: Advance) -> Table:
    model, stock = setting.models()
    token = torch.full((rows, 1), 7, device=setting.device)
    weights = sum(each.nbytes for name, each in model.named_parameters() if "embed_tokens" not in name)
    sides: list[Side] = []
    notes: list[str] = []
    with ExitStack() as opened:

        def add(name: str, make: Callable[[], tuple[Callable[[int], object], Any]]) -> None:
            made, why = None, ""
            try:
                made = make()
            except torch.OutOfMemoryError:
                why = "there is no room for it beside the others"
            except UnsupportedModel as refusal:
                why = str(refusal)
            if made is None:
                notes.append(f"  left out: {name}: {why}")
                # Here, where no traceback keeps what was made of it any more.
                torch.cuda.empty_cache()
                return
            run, cache = made
            held = bytes_of(cache)
            floor = None if held is None else weights + held
            sides.append(Side(name=name, run=run, bytes_read=floor, cache_bytes=held))

        for plan in setting.plans:
            for which in setting.implementations:
                for graphs in setting.ways:
                    make = partial(_replayed, opened) if graphs else _launched
                    name = side_name(plan, which, graphs=graphs)
                    add(name, partial(make, setting, model, plan, which, rows, context, token))
        if setting.own:
            add(OWN, partial(_stock, stock, rows, context, token))
        results = _timed(setting, sides, advance)
    name = f"decode {setting.model} {context} tokens {rows} rows"
    base = side_name(FULL, setting.implementations[0], graphs=setting.ways[-1])
    title = f"a decoded token, {setting.model}, {context} tokens of context, {rows} rows"
    lines, found = compared(title, results, base, bandwidth=setting.bandwidth, notes=notes)
    return Table(lines=lines, rows={name: found, f"{name}, left out": [note.strip() for note in notes]})


def _timed(setting: _Setting, sides: Sequence[Side], advance: Advance) -> list[Measured]:
    """Seconds of a token; a sample is a run of them, one after the other, which the timer knows as layers."""
    return time_in_turns(
        sides, setting.rounds, warmup=_WARMUP, layers=setting.tokens, device=setting.device, sweep=True, advance=advance
    )


def _launched(
    setting: _Setting, model: Any, plan: str, which: str, rows: int, context: int, token: Tensor
) -> tuple[Callable[[int], object], Any]:
    with using(which):
        cache = _ready(setting, model, plan, rows, context)

    def step(_: int) -> None:
        with using(which):
            model(token, **hand_cache(cache), logits_to_keep=1)

    return step, cache


def _replayed(
    opened: ExitStack, setting: _Setting, model: Any, plan: str, which: str, rows: int, context: int, token: Tensor
) -> tuple[Callable[[int], object], Any]:
    with using(which):
        cache = _ready(setting, model, plan, rows, context)
        steps = Replays(model, cache, expected=(setting.rounds + _WARMUP) * setting.tokens)
    # The recording leaves the model as it was.
    opened.callback(steps.land)

    def step(_: int) -> None:
        with using(which):
            steps.step(token)

    return step, cache


def _stock(model: Any, rows: int, context: int, token: Tensor) -> tuple[Callable[[int], object], Any]:
    cache = dynamic_cache(model)
    fill_at_random(cache, model, rows, context)
    model(token, **hand_cache(cache), use_cache=True)
    return lambda _: model(token, **hand_cache(cache), use_cache=True, logits_to_keep=1), cache


@torch.no_grad()
def _prompt_table(setting: _Setting, context: int, advance: Advance) -> Table:
    model, stock = setting.models()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (1, context), generator=generator).to(setting.device)

    def once(plan: str, which: str) -> Callable[[int], object]:
        def run(_: int) -> None:
            with using(which):
                model(ids, **hand_cache(cache_for(model, plan)), logits_to_keep=1)

        return run

    runs = {side_name(plan, which): once(plan, which) for plan in setting.plans for which in setting.implementations}
    if setting.own:
        runs[OWN] = lambda _: stock(ids, **hand_cache(dynamic_cache(stock)), use_cache=True, logits_to_keep=1)
    notes, peaks = [], {}
    for name, run in runs.items():
        try:
            peaks[name] = _peak(run, setting.device)
        except torch.OutOfMemoryError:
            notes.append(f"  left out: {name}: there is no room for it")
        torch.cuda.empty_cache()
    sides = [Side(name=name, run=runs[name]) for name in peaks]
    results = time_in_turns(
        sides, setting.prefill_rounds, warmup=_WARMUP, device=setting.device, sweep=True, advance=advance
    )
    name, base = f"prompt {setting.model} {context} tokens", side_name(FULL, setting.implementations[0])
    lines, rows = compared(f"a prompt, {setting.model}, {context} tokens", results, base, notes=notes)
    rows = [{**row, "peak_bytes": peaks[row["name"]]} for row in rows]
    return Table(lines=lines, rows={name: rows, f"{name}, left out": [note.strip() for note in notes]})


def _peak(run: Callable[[int], object], device: torch.device) -> int | None:
    """The most bytes of the device that a run took above what was there before; None where they are not counted."""
    if device.type != "cuda":
        run(0)
        return None
    # What libraries take at their first use is not the plan's.
    run(0)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(0)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)
