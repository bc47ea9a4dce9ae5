"""Stage 1: what each layer loses by each width of its keys and values and by each share of its tokens, and the optimum.

One layer, and of it one side, is compressed at a time, and KL to the full cache is measured on pieces that all settings
share. Every such setting is a plan of its own, so its numbers are records of the bench as any other's. What they add up
to under a limit of bytes is solved exactly (`solve`), and for another limit without measuring anew. That damages of
different layers and sides add up is an assumption: `additivity` holds the sum against the measured plan.

The rest is a choice of one option for each layer, and for each of its heads, which HiGHS (SciPy's `milp`) solves
exactly: SciPy is kept by others, takes couplings that dynamic programming over bytes would need rounding for, and tells
where its time did not suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from kvtailor.errors import KvtailorError
from kvtailor.fitting.measuring import Measured, Measurer
from kvtailor.fitting.pieces import Piece
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import Plan

__all__ = [
    "Additivity",
    "Choice",
    "LayerMap",
    "Options",
    "PLAIN",
    "Solved",
    "additivity",
    "codec_by_layer",
    "measure_layers",
    "settings",
    "solve",
    "solved_plan",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What each layer can have, what it loses by it, and what it costs.

    Attributes:
        keys: [l][w] loss where the keys of layer l have width number w, and nothing else is compressed.
        values: [l][w] the same for values.
        kept: [l][g][f] loss where the heads of group g of layer l keep share number f of their tokens.
        bytes: [l][wk][wv][f] bytes of one group of heads of layer l.
    """

    keys: np.ndarray
    values: np.ndarray
    kept: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One option for each layer.

    Attributes:
        keys, values: (l,) number of the width.
        kept: (l, g) number of the share.
        loss: the sum of the losses, as if they added up.
        bytes: the sum of the bytes.
        gap: how far above the least possible loss this may be, as a share of it; 0.0: it is the least.
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    loss: float
    bytes: float
    gap: float


def solve(options: Options, limit: float, *, seconds: float = 60.0) -> Choice | None:
    """Return the choice with the least loss whose bytes are at most `limit`; None where no choice has so few.

    Args:
        options: see there.
        limit: bytes.
        seconds: after which the best that was found is taken, and `gap` says how far it may be off.

    Raises:
        KvtailorError: the solver failed.
    """
    layers, key_widths = options.keys.shape
    value_widths, (_, groups, shares) = options.values.shape[1], options.kept.shape
    if float(options.bytes.reshape(layers, -1).min(1).sum()) * groups > limit:
        return None
    pairs = list(product(range(key_widths), range(value_widths)))
    # x[l, w]: layer l has the widths w; y[l, w, g, f]: it has, and its group g keeps share f.
    count_x = layers * len(pairs)
    x = np.arange(count_x).reshape(layers, len(pairs))
    y = count_x + np.arange(layers * len(pairs) * groups * shares).reshape(layers, len(pairs), groups, shares)
    loss, size = np.zeros(count_x + y.size), np.zeros(count_x + y.size)
    for w, (wk, wv) in enumerate(pairs):
        loss[x[:, w]] = options.keys[:, wk] + options.values[:, wv]
        loss[y[:, w]] = options.kept
        size[y[:, w]] = options.bytes[:, wk, wv][:, None, :]
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    right: list[float] = []

    def equal(places: np.ndarray, factors: np.ndarray, to: float) -> None:
        rows.extend([len(right)] * places.size)
        columns.extend(places.tolist())
        entries.extend(factors.tolist())
        right.append(to)

    for layer in range(layers):
        equal(x[layer], np.ones(len(pairs)), 1.0)
        for w in range(len(pairs)):
            for group in range(groups):
                places = y[layer, w, group]
                equal(np.append(places, x[layer, w]), np.append(np.ones(shares), -1.0), 0.0)
    shape = (len(right), loss.size)
    # Numbers near 1 keep the solver's tolerances meaningful: bytes are shares of the limit, losses of the largest.
    scale = float(np.abs(loss).max()) or 1.0
    found = milp(
        loss / scale,
        constraints=[
            LinearConstraint(csr_array((entries, (rows, columns)), shape=shape), right, right),
            LinearConstraint(csr_array(size[None] / limit), -np.inf, 1.0),
        ],
        bounds=Bounds(0, 1),
        integrality=np.ones(loss.size),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if found.x is None:
        if found.status == 2:
            return None
        raise KvtailorError(f"the solver of stage 1 found no choice under {limit:.0f} bytes: {found.message}")
    chosen = found.x.round().astype(bool)
    which = [pairs[int(np.flatnonzero(chosen[x[layer]])[0])] for layer in range(layers)]
    kept = []
    for layer in range(layers):
        w = int(np.flatnonzero(chosen[x[layer]])[0])
        kept.append(tuple(int(np.flatnonzero(chosen[y[layer, w, group]])[0]) for group in range(groups)))
    return Choice(
        keys=tuple(wk for wk, _ in which),
        values=tuple(wv for _, wv in which),
        kept=tuple(kept),
        loss=float(loss[chosen].sum()),
        bytes=float(size[chosen].sum()),
        gap=max(0.0, float(found.mip_gap or 0.0)),
    )


PLAIN = 0
"""Stands among widths for keys or values that are not encoded."""
_RECENT = 32


@dataclass(frozen=True, kw_only=True)
class LayerMap:
    """What each layer loses by itself.

    Attributes:
        score: the scorer that chose the tokens which stay, in the plan language; empty: no eviction was measured.
        widths: bits that were tried, `PLAIN` first.
        shares: shares of the tokens that were tried, 1.0 first.
        keys, values: [l][w] mean loss where layer l alone has widths[w] on that side.
        kept: [l][g][s] mean loss where head g of layer l alone keeps shares[s]; one entry [l][0] where all heads of a
            layer were cut together.
        pieces: how many pieces each number is the mean of.
    """

    score: str
    widths: tuple[int, ...]
    shares: tuple[float, ...]
    keys: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]
    kept: tuple[tuple[tuple[float, ...], ...], ...]
    pieces: int

    @property
    def layers(self) -> int:
        """How many layers the plan compresses."""
        return len(self.keys)

    def restricted(self, *, least_width: int = 1, least_share: float = 0.0) -> LayerMap:
        """Return the map without widths and shares below these; `PLAIN` and 1.0 stay."""
        widths = [n for n, width in enumerate(self.widths) if width == PLAIN or width >= least_width]
        shares = [n for n, share in enumerate(self.shares) if share >= min(1.0, least_share)]
        return replace(
            self,
            widths=tuple(self.widths[n] for n in widths),
            shares=tuple(self.shares[n] for n in shares),
            keys=tuple(tuple(row[n] for n in widths) for row in self.keys),
            values=tuple(tuple(row[n] for n in widths) for row in self.values),
            kept=tuple(tuple(tuple(row[n] for n in shares) for row in groups) for groups in self.kept),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("score", "widths", "shares", "keys", "values", "kept", "pieces")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> LayerMap:
        """Return what `as_dict` wrote."""
        return cls(**{name: _tuples(value) for name, value in found.items()})


@dataclass(frozen=True, kw_only=True)
class Additivity:
    """Whether losses of layers add up.

    Attributes:
        plan: the plan of the optimum.
        predicted: the sum of its layers' losses, each measured alone.
        measured: its loss, on the same pieces.
    """

    plan: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """measured / predicted; None where nothing was predicted to be lost."""
        return self.measured / self.predicted if self.predicted > 0 else None


@dataclass(frozen=True, kw_only=True)
class Solved:
    """What stage 1 makes of a limit.

    Attributes:
        plan: that fits.
        loss: the sum of its layers' losses, each measured alone.
        gap: how far above the least sum this may be, as a share of it; 0.0 where the solver had time to show it.
    """

    plan: Plan
    loss: float
    gap: float


def settings(
    geometry: Geometry, *, score: str, widths: Sequence[int], shares: Sequence[float], by_head: bool
) -> dict[tuple[str, int, int, int], Plan]:
    """Return the plans that stage 1 measures, by side ("keys", "values", "kept"), layer, head and number of the option.

    Args:
        geometry: of the model.
        score: scorer of the evictions; empty: none.
        widths: bits, without `PLAIN`.
        shares: of tokens, below 1.
        by_head: cut one head at a time instead of one layer.
    """
    layers, heads = len(geometry.compressed), geometry.kv_heads
    found: dict[tuple[str, int, int, int], Plan] = {}
    for layer in range(layers):
        for number, width in enumerate(widths, 1):
            for side in ("keys", "values"):
                pair = (width, PLAIN) if side == "keys" else (PLAIN, width)
                each = [pair if other == layer else (PLAIN, PLAIN) for other in range(layers)]
                found[side, layer, 0, number] = Plan.parse(codec_by_layer(each))
        for number, share in enumerate(shares if score else (), 1):
            for head in range(heads if by_head else 1):
                if by_head:
                    table: Any = [[1.0] * heads for _ in range(layers)]
                    table[layer][head] = share
                    mean = (layers * heads - 1 + share) / (layers * heads)
                else:
                    table = [1.0] * layers
                    table[layer] = share
                    mean = (layers - 1 + share) / layers
                found["kept", layer, head, number] = Plan.parse(f"{score} + table(weights={table}) @ keep={mean:.12g}")
    return found


def measure_layers(
    measurer: Measurer,
    geometry: Geometry,
    pieces: Sequence[Piece],
    *,
    score: str,
    widths: Sequence[int],
    shares: Sequence[float],
    by_head: bool = False,
) -> LayerMap:
    """Return what each layer loses by itself, on these pieces.

    Raises:
        KvtailorError: a setting cannot be measured.
    """
    plans = settings(geometry, score=score, widths=widths, shares=shares, by_head=by_head)
    measured = dict(zip(plans, measurer.measure(list(plans.values()), pieces, may_do_nothing=True), strict=True))
    for found in measured.values():
        if found.error is not None:
            raise KvtailorError(f"stage 1 cannot measure {found.plan}: {found.error}")
    layers, groups = len(geometry.compressed), geometry.kv_heads if by_head else 1

    def row(side: str, layer: int, group: int, count: int) -> tuple[float, ...]:
        return (0.0, *(measured[side, layer, group, number].loss for number in range(1, count + 1)))

    evicting = len(shares) if score else 0
    return LayerMap(
        score=score,
        widths=(PLAIN, *widths),
        shares=(1.0, *shares) if score else (1.0,),
        keys=tuple(row("keys", layer, 0, len(widths)) for layer in range(layers)),
        values=tuple(row("values", layer, 0, len(widths)) for layer in range(layers)),
        kept=tuple(tuple(row("kept", layer, group, evicting) for group in range(groups)) for layer in range(layers)),
        pieces=len(pieces),
    )


def solved_plan(
    found: LayerMap,
    geometry: Geometry,
    *,
    context: int,
    batch: int,
    element: int,
    memory: int,
    size: Callable[[Plan], int | None],
    score: str | None = None,
) -> Solved | None:
    """Return the plan of the least sum of losses that fits; None where nothing fits.

    Args:
        found: what each layer loses.
        geometry: of the model.
        context: tokens of a prompt. batch: rows. element: bytes of an element of the cache's dtype.
        memory: bytes of the whole cache.
        size: bytes that a plan's cache will have; None: it cannot be had. What it says decides: the sums that the
            solver sees leave out positions and spare slots, so that its limit is moved until the plan itself fits.
        score: another scorer than the map's, in the plan language.
    """
    limit, best = float(memory), None
    low, high = 0.0, None
    for _ in range(8):
        options = _options(found, geometry, context=context, batch=batch, element=element)
        choice = solve(options, limit)
        if choice is None:
            low, fits = limit, False
            if high is None:
                return None
        else:
            plan = plan_of(found, choice, context=context, score=score)
            bytes_held = size(plan)
            fits = bytes_held is not None and bytes_held <= memory
            if fits:
                best = Solved(plan=plan, loss=choice.loss, gap=choice.gap)
                low = limit
                if bytes_held is not None and bytes_held >= 0.99 * memory:
                    break
            else:
                high = limit
        if high is None:
            if limit >= 2 * memory:
                break
            limit *= 1.1
        else:
            limit = 0.9 * high if low == 0.0 else (low + high) / 2
    return best


def plan_of(found: LayerMap, choice: Choice, *, context: int, score: str | None = None) -> Plan:
    """Return the plan of a choice: its codecs, and where a layer drops tokens its table of shares."""
    each = [(found.widths[k], found.widths[v]) for k, v in zip(choice.keys, choice.values, strict=True)]
    words = [] if all(pair == (PLAIN, PLAIN) for pair in each) else [codec_by_layer(each)]
    kept = [[found.shares[number] for number in groups] for groups in choice.kept]
    flat = [share for groups in kept for share in groups]
    if all(share == 1.0 for share in flat):
        return Plan.parse(" + ".join(words) or "full")
    # Proportional weights: the largest is the share itself, so that numbers stay readable.
    weights: Any = [groups[0] for groups in kept] if len(kept[0]) == 1 else kept
    tokens = max(1, int(fmean(flat) * context))
    table = [] if len(set(flat)) == 1 else [f"table(weights={weights})"]
    return Plan.parse(" + ".join([score or found.score, *table, *words]) + f" @ tokens={tokens}")


def codec_by_layer(widths: Sequence[tuple[int, int]]) -> str:
    """Return the codec whose layers have these bits of keys and values, in the plan language."""
    kinds = list(dict.fromkeys(widths))
    words = [_codec(*pair) for pair in kinds]
    if len(kinds) == 1:
        return words[0]
    return f"by_layer(of=[{', '.join(words)}], layers={[kinds.index(pair) for pair in widths]})"


def additivity(found: Measured, predicted: float) -> Additivity:
    """Return what the sum says of a plan, beside what was measured."""
    return Additivity(plan=str(found.plan), predicted=predicted, measured=found.loss)


def _codec(keys: int, values: int) -> str:
    if keys == values == PLAIN:
        return "plain"
    if PLAIN in (keys, values):
        side, bits = ("keys", keys) if values == PLAIN else ("values", values)
        return f"kivi(bits={bits}, recent={_RECENT}, only={side})"
    if keys == values:
        return f"kivi(bits={keys}, recent={_RECENT})"
    return f"kivi(key_bits={keys}, value_bits={values}, recent={_RECENT})"


def _options(found: LayerMap, geometry: Geometry, *, context: int, batch: int, element: int) -> Options:
    """The solver's numbers; bytes of all rows."""
    from kvtailor.encode.kivi import Kivi

    shapes = geometry.compressed_shapes
    count = len(found.shares)
    sizes = np.zeros((found.layers, len(found.widths), len(found.widths), count))
    for layer, shape in enumerate(shapes):
        heads = shape.kv_heads / len(found.kept[layer])
        for k, key_bits in enumerate(found.widths):
            for v, value_bits in enumerate(found.widths):
                key, value = shape.key_size * element, shape.value_size * element
                coded = Kivi(bits=key_bits or 1).key_bytes(shape.key_size, element) if key_bits else key
                coded += Kivi(bits=value_bits or 1).value_bytes(shape.value_size, element) if value_bits else value
                for s, share in enumerate(found.shares):
                    tokens = share * context
                    tail = min(_RECENT, tokens) if key_bits or value_bits else 0.0
                    # Dropped tokens leave the others with a position each.
                    position = 4 * tokens if share < 1 else 0.0
                    sizes[layer, k, v, s] = batch * heads * ((tokens - tail) * coded + tail * (key + value) + position)
    return Options(
        keys=np.array(found.keys),
        values=np.array(found.values),
        kept=np.array(found.kept),
        bytes=sizes,
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list | tuple) else value
