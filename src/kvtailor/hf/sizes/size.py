"""How many bytes a cache will hold at a length, before any run: closed forms where they are exact, bounds elsewhere.

Beside tokens these are what layers remember for a plan's methods (queries, sums over queries, what an attention
carries), and what a plan with another tier holds (headers, padding, and copies on the device; where the tier packs what
it holds, that is less than nothing at the least). Where the bytes are not known exactly, sentences say why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtailor.attend.contract import Attention, CarryRequest
from kvtailor.calibration_file import calibrated
from kvtailor.encode.by_age import ByAge
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.engine.apply import count_first_tokens, count_waiting_in_tail, may_stay_tail
from kvtailor.engine.budget import waiting_tokens
from kvtailor.errors import ArgumentError, PlanError
from kvtailor.hf.attention import NAME
from kvtailor.hf.layers.of_cache import plan_misfits
from kvtailor.hf.make_cache import check_fit
from kvtailor.hf.model.cache_dtype import dtype_of_caches
from kvtailor.hf.model.calibrated import calibrations_of, tensors_of
from kvtailor.hf.model.config import config_of
from kvtailor.hf.model.geometry import Geometry, check
from kvtailor.hf.sizes.layer import LayerForecast
from kvtailor.hf.sizes.segments import NOTHING, Bounds, BytesByAge, SegmentBytes, summed
from kvtailor.hf.sizes.simulate import Evictions, Holding, Unit, simulate
from kvtailor.ops.notebook_html import Share, Shown, html_block, html_table
from kvtailor.ops.sizes import byte_text
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested
from kvtailor.plan.calls import check_call
from kvtailor.plan.registry import name_of
from kvtailor.store.tiered import Tiered
from kvtailor.types import Needs, Rotation

if TYPE_CHECKING:
    from kvtailor.hf.model.layer_shapes import LayerShape

__all__ = [
    "CacheSize",
    "cache_size",
    "forecast_size",
    "known_size",
    "largest_fitting",
    "largest_tokens",
]

# Tokens and rows whose bytes no number here outgrows.
_MOST = 10**9
_DTYPES = {4: torch.float32, 2: torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """What `cache.ledger()` will have after a prompt and some decoded tokens. All sizes are bytes.

    Attributes:
        plan: as text.
        context: tokens of the prompt, in each row.
        batch: rows.
        new_tokens: tokens that were decoded after the prompt, one by one.
        total: of the whole cache: the number itself where it is known before a run, else the middle of `low`
            and `high`.
        low, high: bounds of the total, both included. They are equal where nothing depends on the text.
        stages: bounds by the ledger's names of stages, without those that hold nothing.
        full: of the same tokens without compression, as `Ledger.full`.
        tokens_held: per kv head of the compressed layers, on average over rows, heads and layers; the middle of its
            bounds; None where the plan compresses no layer.
        tokens: held, over all rows, compressed layers and kv heads.
        tail: of them the newest in full precision that wait for the codec or stay, of each row and kv head, at most.
        uncut: of keys and values of the prompt that wait uncompressed while it is cut, beside what is compressed
            already: one layer where layers are cut one by one, all where they are cut together.
        reasons: why `low` and `high` differ, a sentence each; empty where they do not.
    """

    plan: str
    context: int
    batch: int
    new_tokens: int
    total: int
    low: int
    high: int
    stages: Mapping[str, Bounds]
    full: int
    tokens_held: float | None
    tokens: Bounds
    tail: int
    uncut: int
    reasons: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the total is known before a run."""
        return self.low == self.high

    @property
    def share(self) -> float:
        """total / full."""
        return self.total / self.full

    def as_dict(self) -> dict[str, object]:
        """For JSON: bounds as pairs."""
        names = (
            "plan",
            "context",
            "batch",
            "new_tokens",
            "total",
            "low",
            "high",
            "full",
            "share",
            "tokens_held",
            "uncut",
        )
        found: dict[str, object] = {name: getattr(self, name) for name in names}
        found["stages"] = {name: [each.low, each.high] for name, each in self.stages.items()}
        return {**found, "reasons": list(self.reasons)}

    def __str__(self) -> str:
        """The size in a few lines, in units of 1024."""
        after = f" and {self.new_tokens} decoded ones" if self.new_tokens else ""
        rows = f"{self.batch} rows of " if self.batch > 1 else ""
        size = byte_text(self.total)
        if not self.exact:
            size = f"{byte_text(self.low)} to {byte_text(self.high)}"
        lines = [
            f"{self.plan}: {size} after {rows}{self.context} tokens{after}, "
            f"{'' if self.exact else 'about '}{self.share:.3f} of {byte_text(self.full)} without the plan"
        ]
        for name, each in self.stages.items():
            amount = byte_text(each.low) if each.exact else f"{byte_text(each.low)} to {byte_text(each.high)}"
            lines.append(f"  {name:<8} {amount}")
        return "\n".join([*lines, *(f"  not known before a run: {reason}" for reason in self.reasons)])

    def __repr__(self) -> str:
        size = f"{self.total} bytes" if self.exact else f"{self.low} to {self.high} bytes"
        return (
            f"CacheSize({self.plan!r}, context={self.context}, batch={self.batch}, new_tokens={self.new_tokens}: "
            f"{size} of {self.full})"
        )

    def _repr_html_(self) -> str:
        """For notebooks: the bytes by stage, as shares of the uncompressed cache."""
        bounds = {"the whole cache": Bounds(self.low, self.high), **self.stages}
        rows: list[list[Shown]] = [
            [
                name,
                byte_text(each.low) if each.exact else f"{byte_text(each.low)} to {byte_text(each.high)}",
                Share(f"{100 * each.high / self.full:.1f} %", each.high / self.full),
            ]
            for name, each in bounds.items()
        ]
        heads = ["bytes", "before any run", "of the uncompressed cache, at most"]
        after = f" and {self.new_tokens} decoded ones" if self.new_tokens else ""
        title = f"{self.plan}: {self.batch} row(s) of {self.context} tokens{after}"
        notes = [f"Not known before a run: {reason}" for reason in self.reasons]
        return html_block(title, html_table(rows, heads), notes=notes)

    @property
    def by_stage(self) -> dict[str, int]:
        """`stages`, each as the middle of its bounds."""
        return {name: each.middle for name, each in self.stages.items()}


def forecast_size(
    plan: Plan,
    geometry: Geometry,
    *,
    context: int,
    batch: int = 1,
    element_size: int,
    own_size: int | None = None,
    new_tokens: int = 0,
    calibration: Mapping[str, Mapping[str, Tensor]] | None = None,
    count_states: bool = True,
    known: dict[Any, SegmentBytes] | None = None,
) -> CacheSize:
    """Return how many bytes a cache will hold after a prompt that is read at once, and tokens decoded after it.

    No model is loaded. Rows are equally long; of heads on several processes it is the sum over all.

    Args:
        plan: of the cache.
        geometry: of the model.
        context: tokens of the prompt, in each row.
        batch: rows.
        element_size: bytes of an element of the cache's dtype, 2 or 4.
        own_size: of the model's, in which its own windows and states are; None: it is the cache's.
        new_tokens: decoded one by one after the prompt.
        calibration: tensors of the plan's calibration files, by stage. Without those of an allocator, what follows from
            them has bounds.
        count_states: count recurrent and convolution states; without them the size of any model's cache is known, and
            neither `total` nor `full` has them.
        known: what codecs of this model were found to store, of earlier calls with the same calibrations; filled here.

    Raises:
        PlanError: the model refuses the plan.
        UnsupportedModel: the plan has `bytes=`, and the size of a layer's states is not known before a run.
        ArgumentError: a number that no cache can have, or a model of whose states the size is not known.
    """
    for name, number, least in (("context", context, 1), ("batch", batch, 1), ("new_tokens", new_tokens, 0)):
        if number < least:
            raise ArgumentError(f"asked for the size of a cache with {name}={number}: give {least} or more")
        if number > _MOST:
            raise ArgumentError(f"asked for the size of a cache with {name}={number}: give at most {_MOST}")
    if element_size not in _DTYPES:
        raise ArgumentError(f"asked for a cache of {element_size} bytes an element: give 4 (float32) or 2 (16 bits)")
    misfits = plan_misfits(plan, geometry)
    if misfits:
        raise PlanError(str(plan), misfits)
    states = geometry.state_bytes(own_size or element_size) if count_states else 0
    if states is None:
        raise ArgumentError(
            f"how many bytes the recurrent states of this {geometry.model_type} take is not known before they are "
            "there, so neither is the size of its cache: read cache.ledger() after a run"
        )
    files = calibration or {}
    shapes, needs = geometry.compressed_shapes, plan.needs
    units = _units(plan, geometry, batch, element_size, files.get("encode"), {} if known is None else known)
    evictions = None
    if plan.evicts and shapes:
        evictions = Evictions(
            plan=plan,
            geometry=geometry,
            rows=batch,
            element_size=element_size,
            own_size=own_size,
            calibration=files.get("allocate"),
        )
    scores = max(1, needs.notes) if needs.previous else 0
    held = simulate(units, evictions, context=context, new_tokens=new_tokens, mass=needs.mass, scores=scores)
    whole = Holding.together(held)
    seen = context + new_tokens
    observed, carried, counted = _remembered(plan, geometry, batch, element_size, context, new_tokens, units, held)
    stages = dict(whole.stages)
    stages["observe"] += observed + counted
    stages["attend"] = carried
    stages["window"] = Bounds.exactly(
        geometry.full_bytes(batch, seen, element_size, own_size) - _compressed_full(geometry, batch, seen, element_size)
    )
    stages["state"] = Bounds.exactly(states * batch)
    moved = NOTHING
    if plan.store.moves and units:
        moved, stages["store"] = _tier_bytes(plan, units, held, batch)
        stages["encode"] += moved
    total = whole.total + summed((observed, counted, carried, stages["window"], stages["state"], moved))
    total += stages.get("store", NOTHING)
    heads = batch * sum(shape.kv_heads for shape in shapes)
    each = element_size * batch * context
    waiting = [each * shape.token_elements for shape in shapes]
    return CacheSize(
        plan=str(plan),
        context=context,
        batch=batch,
        new_tokens=new_tokens,
        total=total.middle,
        low=total.low,
        high=total.high,
        stages={name: bounds for name, bounds in stages.items() if bounds.high},
        full=geometry.full_bytes(batch, seen, element_size, own_size) + states * batch,
        tokens=whole.tokens,
        tail=whole.tail,
        tokens_held=(whole.tokens.low + whole.tokens.high) / 2 / heads if heads else None,
        uncut=sum(waiting)
        if plan.evicts and plan.scope == "prompt" or needs.reconstruction
        else max(waiting, default=0),
        reasons=() if total.exact else _reasons_of(plan, evictions, whole, stages),
    )


@check_call
def cache_size(
    model: str | Path | Any,
    plan: str | Plan,
    *,
    context: int,
    batch: int = 1,
    new_tokens: int = 0,
    dtype: str | torch.dtype | None = None,
) -> CacheSize:
    """Return how many bytes a cache will hold, before any run.

    ```python
    size = kvtailor.cache_size("demo", "snapkv + kivi4 @ keep=0.25", context=4096, batch=8)
    print(size, size.total)
    ```

    Args:
        model: a transformers model, or the name or folder of one, of which the configuration alone is read.
        plan: one line or a `Plan`.
        context: tokens of the prompt, in each row, read at once.
        batch: rows, equally long.
        new_tokens: decoded one by one after the prompt.
        dtype: of the cache, such as "bfloat16"; None: what `kvtailor.cache_for` takes by itself, else float32. Windows
            and states of a model in float32 stay float32, see there.

    Raises:
        PlanError: with all faults of the plan, or where the model refuses it.
        UnsupportedModel: for a model that cannot be compressed.
        CalibrationError: a model was given, and a method needs a calibration that is not there for it.
        ArgumentError: a number that no cache can have, or a model of whose states the size is not known.
    """
    return known_size(model, plan, context=context, batch=batch, new_tokens=new_tokens, dtype=dtype, known={})


def known_size(
    model: Any,
    plan: str | Plan,
    *,
    context: int,
    batch: int,
    new_tokens: int = 0,
    dtype: str | torch.dtype | None = None,
    known: dict[Any, SegmentBytes],
) -> CacheSize:
    """Return what `cache_size` does, faster for many plans of one model: what codecs store is kept in `known`."""
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    named = isinstance(model, str | Path)
    config = config_of(str(model)) if named else model.config
    if not named:
        check(model, NAME)
    geometry = Geometry.of(config)
    if not named:
        check_fit(model, parsed, geometry)
    misfits = plan_misfits(parsed, geometry)
    if misfits:
        raise PlanError(str(parsed), misfits)
    # A cache of a model in float32 may hold less; of any other it holds what the model does.
    own = torch.float32.itemsize if not named and model.dtype is torch.float32 else None
    return forecast_size(
        parsed,
        geometry,
        context=context,
        batch=batch,
        element_size=_element_size(config, None if named else model, dtype),
        own_size=own,
        new_tokens=new_tokens,
        calibration=None if named or not geometry.compressed else _tensors(parsed, model),
        known=known,
    )


def _element_size(config: Any, model: Any, dtype: str | torch.dtype | None) -> int:
    """Bytes of an element of the cache."""
    own = config.get_text_config(decoder=True).dtype if model is None else dtype_of_caches(model)
    asked = own if dtype is None else dtype
    found = getattr(torch, asked.removeprefix("torch."), None) if isinstance(asked, str) else asked
    if found is None and asked is None:
        found = torch.float32
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(f"asked for a cache in {dtype!r}: give float32, bfloat16 or float16")
    return found.itemsize


def _tensors(plan: Plan, model: Any) -> Mapping[str, Mapping[str, Tensor]]:
    """The tensors of the plan's calibration files by stage, as `cache_for` reads them."""
    if not any(calibrated(with_nested(part)) for part in plan.parts.values()):
        return {}
    cpu = torch.device("cpu")
    return {stage: tensors_of(found, plan, cpu) for stage, found in calibrations_of(plan, model).items()}


def largest_tokens(
    plan: Plan,
    geometry: Geometry,
    *,
    memory: int,
    context: int,
    batch: int = 1,
    element_size: int,
    known: dict[Any, SegmentBytes] | None = None,
) -> int | None:
    """Return the largest budget `tokens=` for which the whole cache surely fits, at most `context`.

    It is sought over the upper bound of `forecast_size`. Where heads are stored in pages that bound has small steps
    down, and a budget a few tokens above the result may fit as well.

    Args:
        plan: that evicts; its own budget is replaced.
        geometry: of the model.
        memory: bytes for the whole cache.
        context, batch, element_size, known: see `forecast_size`.

    Returns:
        None where not even `tokens=1` fits.

    Raises:
        PlanError: the plan evicts nothing, or the model refuses it.
        ArgumentError: see `forecast_size`; or fewer than 0 bytes.
    """
    if memory < 0:
        raise ArgumentError(f"asked for the largest budget in {memory} bytes: give 0 or more")
    if not plan.evicts:
        raise PlanError(str(plan), [f"it evicts nothing, so it has no budget to choose: {name_of(plan.encode)} alone"])
    stored: dict[Any, SegmentBytes] = {} if known is None else known

    def bytes_of(tokens: int) -> int:
        budgeted = replace(plan, tokens=tokens, keep=None, bytes=None)
        return forecast_size(
            budgeted, geometry, context=context, batch=batch, element_size=element_size, known=stored
        ).high

    return largest_fitting(bytes_of, memory, context)


def largest_fitting(bytes_of: Callable[[int], int | None], memory: int, most: int) -> int | None:
    """Return the largest number of tokens, at most `most`, whose bytes fit; None where not even one token's do.

    Args:
        bytes_of: grows with the tokens, nearly in a line; None: there is no such cache.
        memory: bytes.
        most: tokens.
    """
    low, high = 1, most
    below, above = bytes_of(low), bytes_of(high)
    # All tokens may take less than one fewer, whose columns are stored; one token never takes more than that.
    if below is None or above is None or below > memory:
        return None
    if above <= memory:
        return high
    guesses = 0
    while high - low > 1:
        # Of three guesses two lie where the line meets the memory, just below and just above, since whole pages are
        # stored, and where nothing is dropped there is another line; one halves what is between.
        guess = low + (memory - below) * (high - low) // max(1, above - below)
        guess = (guess, guess + 1, (low + high) // 2)[guesses % 3]
        guess, guesses = min(max(guess, low + 1), high - 1), guesses + 1
        size = bytes_of(guess)
        if size is not None and size <= memory:
            low, below = guess, size
        else:
            high, above = guess, above if size is None else size
    return low


def _compressed_full(geometry: Geometry, rows: int, seen: int, element_size: int) -> int:
    return rows * seen * element_size * sum(shape.token_elements for shape in geometry.compressed_shapes)


def _remembered(
    plan: Plan,
    geometry: Geometry,
    rows: int,
    element_size: int,
    context: int,
    new_tokens: int,
    units: Sequence[Unit],
    held: Sequence[Holding],
) -> tuple[Bounds, Bounds, Bounds]:
    """Bytes of the evidence, of what the attention carries, and of the counts of what it has read, over all layers."""
    observed, carried, counted = [], [], []
    every = zip(geometry.compressed, geometry.compressed_shapes, _by_layer(units, held), strict=True)
    for index, shape, (tokens, longest) in every:
        of_layers = {"rows": rows, "element_size": element_size, "context": context, "new_tokens": new_tokens}
        readers = len(geometry.readers.get(index, ()))
        observed.append(_evidence_bytes(plan, shape, readers=readers, **of_layers))
        each = _carried_bytes(plan.attend, shape, held=tokens, longest=longest, **of_layers)
        # What other layers of the model read of this one may take the place of its own index.
        carried.append(Bounds(0, each[0].high * (1 + readers)) if readers else each[0])
        counted.append(each[1])
    return summed(observed), summed(carried), summed(counted)


def _by_layer(units: Sequence[Unit], held: Sequence[Holding]) -> list[tuple[Bounds, int]]:
    """Tokens of each compressed layer, over all rows and kv heads, and the most that one of them holds."""
    count = sum(len(unit.layers) for unit in units)
    if len(held) != len(units):
        # Any layer may hold all that is held.
        return [(Bounds(0, held[0].tokens.high), held[0].longest)] * count
    found: list[tuple[Bounds, int]] = []
    for unit, each in zip(units, held, strict=True):
        layers = len(unit.layers)
        found += [(Bounds(each.tokens.low // layers, each.tokens.high // layers), each.longest)] * layers
    return found


def _units(
    plan: Plan,
    geometry: Geometry,
    rows: int,
    element_size: int,
    calibration: Mapping[str, Tensor] | None,
    known: dict[Any, SegmentBytes],
) -> list[Unit]:
    """The compressed layers, those that are encoded together in one."""
    shapes = geometry.compressed_shapes
    count = len(shapes)
    tensors = calibration if calibration is not None else _stand_in(plan, geometry)
    units = []
    for group in plan.encode.layer_groups(count) if count else ():
        shape = shapes[group[-1]]
        context = CodecContext(
            layer=group[-1],
            layers=count,
            # Bytes do not depend on the angles.
            rotation=Rotation(frequencies=torch.ones(max(1, shape.key_size // 2), dtype=torch.float32)),
            heads=shape.kv_heads,
            evicts=plan.evicts,
            calibration=tensors,
        )
        codec = plan.encode.for_layer(context)
        sizes = shape.key_size, shape.value_size
        # Codecs whose closed forms agree, of one spelling, store alike: what is known of one layer serves the next.
        each = codec.bytes_per_token(*sizes, element_size)
        key = repr(codec), each, len(group), shape.kv_heads, shape.q_heads, sizes, element_size
        if key not in known:
            known[key] = _segments(codec, len(group), shape, sizes, _DTYPES[element_size])
        make = partial(
            LayerForecast,
            codec=codec,
            segments=known[key],
            rows=rows,
            heads=shape.kv_heads,
            token_bytes=(shape.key_size + shape.value_size) * element_size,
            weighted=plan.merge.weighted,
            may_stay_tail=may_stay_tail(plan, codec),
            waiting=waiting_tokens(plan, codec),
            block=count_waiting_in_tail(plan, codec),
            first=count_first_tokens(plan),
        )
        units.append(Unit(layers=tuple(group), make=make))
    return units


def _segments(codec: Codec, layers: int, shape: LayerShape, sizes: tuple[int, int], dtype: torch.dtype) -> SegmentBytes:
    """The bytes of what a codec stores, as it is on so many layers that are encoded together."""
    if isinstance(codec, ByAge):
        return BytesByAge(codec, [_segments(each, layers, shape, sizes, dtype) for each in codec.of])
    return SegmentBytes(codec, layers, shape.kv_heads, sizes, dtype, shape.q_heads // shape.kv_heads)


def _stand_in(plan: Plan, geometry: Geometry) -> Mapping[str, Tensor] | None:
    """Random tensors in place of a codec's calibration, the same for each layer: how many bytes it stores is the same.

    Where a file gives layers unequal ranks, these are of the same sum.
    """
    found: dict[str, Tensor] = {}
    for method in calibrated(with_nested(plan.encode)):
        shape = geometry.first
        made = method.example_calibration(
            layers=1,
            heads=shape.kv_heads,
            group=max(1, shape.q_heads // shape.kv_heads),
            size=shape.key_size,
            generator=torch.Generator().manual_seed(0),
        )
        found |= {name: each[:1].expand(len(geometry.compressed), *each.shape[1:]) for name, each in made.items()}
    return found or None


def _keeps_queries(plan: Plan) -> bool:
    """Return whether queries stay once a token was decoded, because a later eviction or encoding may need them."""
    return plan.slack_tokens is not None or plan.encode.needs.window > 0


def _evidence_bytes(
    plan: Plan, shape: LayerShape, *, rows: int, element_size: int, context: int, new_tokens: int, readers: int
) -> Bounds:
    """Return the bytes of one layer's evidence, without the mass and the scores of single tokens (`observe`).

    Args:
        plan: whose methods need it.
        shape: of the layer.
        rows: b.
        element_size: bytes of an element of the cache's dtype.
        context: tokens of the prompt.
        new_tokens: that were decoded.
        readers: other layers of the model that read this one, whose queries may join its window.
    """
    needs: Needs = plan.needs
    found = NOTHING
    queries, size = rows * shape.q_heads, shape.query_size
    # A prompt of a single token counts as a decoded one; a prompt that is repeated is evicted from once.
    if (new_tokens == 0 and context > 1 and needs.reconstruction is None) or _keeps_queries(plan):
        if needs.window:
            window = min(needs.window, context + new_tokens)
            each = window * (queries * size * element_size + 8)
            found += Bounds(each, each * (1 + readers))
        if needs.rows:
            found += Bounds.exactly(needs.rows * (queries * size * element_size + 8 * rows))
        if needs.moments:
            found += Bounds.exactly(4 * (rows + queries * size + queries * size**2))
    if needs.reconstruction is not None and plan.slack_tokens is not None:
        found += Bounds.exactly(4 * rows * shape.kv_heads * context)
    return found


def _carried_bytes(
    attend: Attention,
    shape: LayerShape,
    *,
    rows: int,
    element_size: int,
    held: Bounds,
    longest: int,
    context: int,
    new_tokens: int,
) -> tuple[Bounds, Bounds]:
    """Return the bytes of what one layer's attention carries along, and of the counts of what it has read.

    Args:
        attend: the plan's attention.
        shape: of the layer.
        rows: b.
        element_size: bytes of an element of the cache's dtype.
        held: tokens of the layer, over all rows and kv heads.
        longest: most tokens that one row and kv head holds.
        context: tokens of the prompt.
        new_tokens: that were decoded.
    """
    request = CarryRequest(
        rows=rows,
        heads=shape.kv_heads,
        q_heads=shape.q_heads,
        size=shape.key_size,
        element_size=element_size,
        held=(held.low, held.high),
        longest=longest,
        context=context,
        new_tokens=new_tokens,
    )
    low, high = attend.carried_bytes(request)
    counts = 8 * rows * shape.kv_heads if attend.has_token_budget and new_tokens else 0
    return Bounds(low, high), Bounds(0, counts)


# Of one file: its header fills whole pages of 4096 bytes, and its tensors begin at multiples of 64.
_HEADER = 8192


def _tier_bytes(plan: Plan, units: Sequence[Unit], held: Sequence[Holding], rows: int) -> tuple[Bounds, Bounds]:
    """Return what comes on top of the segments on their tier, and the bytes of copies on the device.

    Args:
        plan: with a placement that moves segments.
        units: layers, those that are encoded together in one.
        held: by each of them, or by all.
        rows: b.
    """
    groups = [unit.layers for unit in units]
    encoded = [each.stages["encode"] for each in held]
    # Where only the sum is known, any of them may have all of it.
    alone = len(held) == len(units)
    most = [each.high for each in encoded] if alone else [summed(encoded).high] * len(units)
    segments = max(each.segments for each in held)
    files = sum(len(group) for group in groups) * segments
    # What stays is there twice once it has been away; one unit more may be on its way, or be read.
    staying = plan.store.open(groups).stays(most)
    if isinstance(plan.store, Tiered):
        staying -= {unit for unit, group in enumerate(groups) if group[-1] < plan.store.on_device_layers}
    copies = sum(most[unit] for unit in staying) + max(most, default=0)
    padding = 64 * 16 * files
    # How much smaller a packed file is depends on what the tokens are.
    least = -summed(encoded).low if plan.store.makes_smaller else 0
    return Bounds(least, files * _HEADER + padding), Bounds(0, min(copies, sum(most)) + padding)


def _reasons_of(
    plan: Plan, evictions: Evictions | None, held: Holding, stages: Mapping[str, Bounds]
) -> tuple[str, ...]:
    """Return what depends on the text, a sentence each.

    Args:
        plan: of the cache.
        evictions: of the plan; None where nothing is evicted.
        held: by all compressed layers.
        stages: bytes by stage.
    """
    found = []
    allocate, select = name_of(plan.allocate), name_of(plan.select)
    if evictions is not None and not held.total.exact:
        if not plan.select.exact:
            found.append(f"{select} takes the budget as an upper bound: how many tokens it keeps depends on the text")
        if evictions.known == "layers":
            found.append(
                f"{allocate} splits a layer's tokens over its kv heads by the text, and heads of unequal length are "
                "stored in pages, of which the last may be partly empty"
            )
        elif evictions.known == "sum":
            found.append(
                f"{allocate} splits the tokens over layers and kv heads by the text or by a calibration: the sum is "
                "known, and spare slots, groups and pages depend on the split"
            )
    if held.moved_codes:
        found.append(
            "an eviction while decoding moves tokens that are encoded: how many share a page or a group's scales "
            "depends on the text"
        )
    if plan.merge.weighted and not held.stages["encode"].exact:
        found.append(f"{name_of(plan.merge)} stores a weight for each token only once one of a layer has one")
    if not stages.get("attend", NOTHING).exact:
        found.append(f"{name_of(plan.attend)} carries an index whose size depends on what each kv head holds")
    if plan.attend.has_token_budget and not stages["observe"].exact:
        found.append(f"{name_of(plan.attend)} counts what it has read only where it did not read all")
    if not stages.get("store", NOTHING).exact:
        found.append(
            f"{name_of(plan.store)} holds copies on the device of what is on its way or stays there, and a header for "
            "each file"
        )
    if plan.store.makes_smaller:
        found.append(f"{name_of(plan.store)} packs its files, and how small they get depends on what the tokens are")
    if not found:
        found.append("which tokens stay depends on the text, and some of them are stored otherwise than others")
    return tuple(found)
