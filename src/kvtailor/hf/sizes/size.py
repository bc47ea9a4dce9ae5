"""How many bytes a cache will hold at a length, before any run: closed forms where they are exact, bounds elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtailor.calibration_file import calibrated
from kvtailor.encode.by_age import ByAge
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.engine.budget import waiting_tokens
from kvtailor.errors import ArgumentError, PlanError
from kvtailor.hf.layers.of_cache import plan_misfits
from kvtailor.hf.sizes.ages import BytesByAge
from kvtailor.hf.sizes.bounds import NOTHING, Bounds, summed
from kvtailor.hf.sizes.evictions import Evictions
from kvtailor.hf.sizes.layer import LayerForecast, Whole
from kvtailor.hf.sizes.observed import carried_bytes, evidence_bytes
from kvtailor.hf.sizes.reasons import reasons_of
from kvtailor.hf.sizes.segments import SegmentBytes
from kvtailor.hf.sizes.simulate import Holding, Unit, gone_through
from kvtailor.hf.sizes.tiers import tier_bytes
from kvtailor.ops.notebook_html import Share, Shown, html_block, html_table
from kvtailor.ops.sizes import binary
from kvtailor.plan.arguments import with_nested
from kvtailor.types import Rotation

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.hf.model.shapes.layer_shapes import LayerShape
    from kvtailor.plan import Plan

__all__ = ["CacheSize", "forecast_size"]

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
        size = binary(self.total)
        if not self.exact:
            size = f"{binary(self.low)} to {binary(self.high)}"
        lines = [
            f"{self.plan}: {size} after {rows}{self.context} tokens{after}, "
            f"{'' if self.exact else 'about '}{self.share:.3f} of {binary(self.full)} without the plan"
        ]
        for name, each in self.stages.items():
            amount = binary(each.low) if each.exact else f"{binary(each.low)} to {binary(each.high)}"
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
                binary(each.low) if each.exact else f"{binary(each.low)} to {binary(each.high)}",
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
    held = gone_through(units, evictions, context=context, new_tokens=new_tokens, mass=needs.mass, scores=scores)
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
        moved, stages["store"] = tier_bytes(plan, units, held, batch)
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
        reasons=() if total.exact else reasons_of(plan, evictions, whole, stages),
    )


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
        observed.append(evidence_bytes(plan, shape, readers=readers, **of_layers))
        each = carried_bytes(plan.attend, shape, held=tokens, longest=longest, **of_layers)
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
        make = partial(_layer, plan, codec, known[key], rows, (shape.key_size + shape.value_size) * element_size)
        units.append(Unit(layers=tuple(group), make=make))
    return units


def _segments(codec: Codec, layers: int, shape: LayerShape, sizes: tuple[int, int], dtype: torch.dtype) -> SegmentBytes:
    """The bytes of what a codec stores, as it is on so many layers that are encoded together."""
    if isinstance(codec, ByAge):
        return BytesByAge(codec, [_segments(each, layers, shape, sizes, dtype) for each in codec.of])
    return SegmentBytes(codec, layers, shape.kv_heads, sizes, dtype, shape.q_heads // shape.kv_heads)


def _layer(
    plan: Plan, codec: Codec, segments: SegmentBytes, rows: int, token_bytes: int, whole: Whole
) -> LayerForecast:
    return LayerForecast(
        codec=codec,
        segments=segments,
        rows=rows,
        heads=segments.heads,
        token_bytes=token_bytes,
        weighted=plan.merge.weighted,
        waiting=waiting_tokens(plan, codec),
        whole=whole,
    )


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
