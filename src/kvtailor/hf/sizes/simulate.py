"""A prompt and decoded tokens, gone through by all compressed layers without tensors: what they hold in the end.

How many tokens an eviction leaves in each layer are the engine's own budgets, as far as the text does not decide them.
Three kinds of allocators are told apart. Some give numbers that follow from the budget alone. Some give every layer the
same sum, which heads share by their scores. Of the others only the sum over all layers is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.engine.budget import Budget, CacheShape, make_budget, recent_tokens
from kvtailor.engine.state import Clock
from kvtailor.hf.sizes.layer import KeptCount, LayerForecast, Whole
from kvtailor.hf.sizes.segments import NOTHING, Bounds, hull, summed
from kvtailor.ops.lanes.apportion import layer_shares
from kvtailor.store.recent_window import capacity_for
from kvtailor.types import Needs

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.plan import Plan

__all__ = ["Evictions", "Holding", "Unit", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Evictions:
    """The evictions of a plan on the compressed layers of a model, of rows that are all equally long.

    Attributes:
        plan: that evicts.
        geometry: of the model.
        rows: b.
        element_size, own_size: bytes of an element of the cache's dtype, and of the model's; see `forecast_size`.
        calibration: tensors of the allocator's calibration files; None: not known.
    """

    plan: Plan
    geometry: Geometry
    rows: int
    element_size: int
    own_size: int | None = None
    calibration: Mapping[str, Tensor] | None = None

    @cached_property
    def shapes(self) -> list[CacheShape]:
        """Of each compressed layer."""
        return [
            CacheShape(
                heads=each.kv_heads,
                key_size=each.key_size,
                value_size=each.value_size,
                element_size=self.element_size,
                rows=self.rows,
            )
            for each in self.geometry.compressed_shapes
        ]

    @cached_property
    def known(self) -> Literal["counts", "layers", "sum"]:
        """What of the budgets is known before a run: each head's, each layer's, or the sum alone."""
        allocate = self.plan.allocate
        if not allocate.needs_scores and allocate.needs == Needs() and self.plan.scope != "progressive":
            seen = 1 << 12
            try:
                self._allocated(seen, [[seen] * shape.heads for shape in self.shapes])
                return "counts"
            except ValueError:
                # By contract an allocator raises this where it needs what only a run measures.
                pass
        return "layers" if allocate.even_layers and self.plan.scope != "progressive" else "sum"

    def recent(self, seen: int) -> int:
        """Return the newest tokens that all heads keep after so many were seen."""
        return int(recent_tokens(self.plan, self._budget(seen, len(self.shapes) - 1).each).min())

    def total(self, seen: int) -> int:
        """Return the tokens that one row may hold over all compressed layers and kv heads."""
        return int(self._budget(seen, len(self.shapes) - 1).each_layer_total)

    def kept(self, seen: int, held: Sequence[Sequence[int]]) -> list[KeptCount | None]:
        """Return what each layer keeps; None where all of it stays as it is. Of plans of which layers are `known`.

        Args:
            seen: tokens of each row.
            held: of each layer the tokens of each kv head of a row, at most; where only their sum is known, any split.
        """
        exact = self.plan.select.exact
        recent = self.recent(seen)
        found: list[KeptCount | None] = []
        if self.known == "counts":
            for own, has in zip(self._allocated(seen, held), held, strict=True):
                if exact and all(due >= there for due, there in zip(own, has, strict=True)):
                    found.append(None)
                elif exact:
                    found.append(KeptCount.of(tuple(own) * self.rows))
                else:
                    found.append(self._at_most(sum(own), len(own), recent, has))
            return found
        for due, has in zip(self._layer_totals(seen, held), held, strict=True):
            if exact and due >= sum(has):
                found.append(None)
            elif exact:
                # A single head in each row leaves nothing to decide.
                found.append(KeptCount(due * self.rows, due * self.rows, alike=len(has) == 1))
            else:
                found.append(self._at_most(due, len(has), recent, has))
        return found

    def _at_most(self, due: int, heads: int, recent: int, has: Sequence[int]) -> KeptCount:
        """What a selector that may keep fewer leaves of a budget of one row: at least one token of each head."""
        low, high = heads * max(1, min(recent, min(has))), min(due, sum(has))
        low = min(low, high)
        return KeptCount(low * self.rows, high * self.rows, alike=heads == 1 and self.rows == 1)

    @cached_property
    def _budgets(self) -> dict[tuple[int, CacheShape], _RowBudget]:
        """What `_budget` has found, by tokens seen and the layer's shape."""
        return {}

    def _budget(self, seen: int, layer: int) -> _RowBudget:
        plan, key = self.plan, (seen, self.shapes[layer])
        if key in self._budgets:
            return self._budgets[key]
        budget = make_budget(
            plan,
            torch.tensor([seen]),
            layers=len(self.shapes),
            newest=self.shapes[layer],
            other_bytes=0 if plan.bytes is None else self.geometry.other_bytes(self.element_size, self.own_size),
            shapes=() if self.geometry.alike else self.shapes,
        )
        found = self._budgets[key] = _RowBudget(
            budget, sum(shape.heads for shape in self.shapes), len(self.shapes) * self.shapes[layer].heads
        )
        return found

    def _bounds(self, seen: int, held: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(1, l, h) int64 what must stay and what there is, of layers with equally many heads."""
        capacity = torch.tensor([list(held)], dtype=torch.int64)
        return capacity.clamp(max=self.recent(seen)), capacity

    def _request(self, seen: int, held: Sequence[Sequence[int]], layers: Sequence[int]) -> BudgetRequest:
        """What the engine asks of the allocator for some layers."""
        budget = self._budget(seen, layers[-1]).budget
        floor, capacity = self._bounds(seen, [held[layer] for layer in layers])
        return BudgetRequest(
            total=budget.total,
            row_tokens=budget.row_tokens,
            capacity=capacity,
            floor=floor,
            layers=tuple(layers),
            num_layers=len(held),
            calibration=self.calibration,
        )

    def _of_layers(
        self, seen: int, held: Sequence[Sequence[int]], found_of: Callable[[BudgetRequest], list[Any]]
    ) -> list[Any]:
        """What each layer is found to get, of all layers at once or of one after the other, as the engine asks."""
        if self.plan.scope != "layer":
            return found_of(self._request(seen, held, range(len(held))))
        found: list[Any] = []
        known: dict[Any, list[Any]] = {}
        for layer, has in enumerate(held):
            # Where nothing of the budget is left over, layers that hold the same get the same, wherever they are.
            even = self.plan.allocate.even_layers and not self._budget(seen, layer).left_over
            key = (self.shapes[layer], tuple(has)) if even else layer
            if key not in known:
                known[key] = found_of(self._request(seen, held, (layer,)))
            found += known[key]
        return found

    def _allocated(self, seen: int, held: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens of each layer's kv heads, of one row."""
        return self._of_layers(seen, held, lambda request: self.plan.allocate.allocate(request)[0].tolist())

    def _layer_totals(self, seen: int, held: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each layer, of one row, where every layer gets the same."""

        def totals(request: BudgetRequest) -> list[int]:
            heads = request.capacity.shape[2]
            low, high = request.floor.sum(-1), request.capacity.sum(-1)
            absent = None if request.row_tokens is None else request.row_tokens * heads
            weights = torch.ones(1, request.num_layers, dtype=torch.float32)
            return layer_shares(weights, request.total, low, high, request.layers, absent)[0].tolist()

        return self._of_layers(seen, held, totals)


@dataclass(frozen=True)
class _RowBudget:
    """A budget of one row, as one layer is told it, whose total is that of all layers if all had its heads."""

    budget: Budget
    every: int
    alike: int

    @property
    def each(self) -> Tensor:
        """(1,) int64 tokens per kv head, on average."""
        return self.budget.each

    @property
    def each_layer_total(self) -> int:
        """Tokens over all layers and heads."""
        return int(self.budget.total) * self.every // self.alike

    @property
    def left_over(self) -> int:
        """Tokens that remain where each layer and head gets the same."""
        return int(self.budget.total) % self.alike


# Numbers of tokens for which a layer is gone through, where only the sum over all layers is known.
_GRID = 160
_ROUNDING = 1e-3
# Rates of bytes per token for which bounds are tried, from 0.5 to 2.5 times that of a long layer.
_RATES = 60
STAGES = ("tail", "encode", "observe")
Cuts = Callable[[int, Sequence[LayerForecast]], Sequence[KeptCount | None]]
"""From tokens seen, and the layers as they are, to what each of them keeps."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A layer, or layers that are encoded together.

    Attributes:
        layers: 0-based among those that the plan compresses.
        make: gives it as it is before the first token; `whole`: see `LayerForecast`.
    """

    layers: tuple[int, ...]
    make: Callable[..., LayerForecast]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one unit, or all of them, hold.

    Attributes:
        stages: bytes by the ledger's names "tail", "encode" and "observe" (of single tokens alone).
        total: their sum, whose bounds may be closer than those of its terms.
        tokens: held, over all rows, kv heads and layers.
        longest: most tokens that one row and kv head holds.
        tail: tokens of the tail of each row and kv head, at most.
        segments: how many segments each layer has, at most.
        moved_codes: tokens have moved that had been encoded before.
    """

    stages: Mapping[str, Bounds]
    total: Bounds
    tokens: Bounds
    longest: int
    tail: int = 0
    segments: int = 0
    moved_codes: bool = False

    @classmethod
    def of(cls, layer: LayerForecast, *, mass: bool, scores: int) -> Holding:
        """Return what one unit holds."""
        observed = (layer.mass_bytes if mass else NOTHING) + layer.scored_bytes(scores)
        stages = {"tail": Bounds.exactly(layer.tail_bytes), "encode": layer.encoded, "observe": observed}
        return cls(
            stages=stages,
            total=summed(stages.values()),
            tokens=layer.held * layer.segments.layers,
            longest=min(layer.held.high, layer.seen) if layer.each is None else max(layer.each),
            tail=layer.tail,
            segments=layer.parts,
            moved_codes=layer.moved_codes,
        )

    @classmethod
    def either(cls, cases: Sequence[Holding]) -> Holding:
        """Return what is held in one of several cases."""
        return cls(
            stages={name: hull(*(case.stages[name] for case in cases)) for name in STAGES},
            total=hull(*(case.total for case in cases)),
            tokens=hull(*(case.tokens for case in cases)),
            longest=max((case.longest for case in cases), default=0),
            tail=max(case.tail for case in cases),
            segments=max(case.segments for case in cases),
            moved_codes=any(case.moved_codes for case in cases),
        )

    @classmethod
    def together(cls, each: Sequence[Holding]) -> Holding:
        """Return what several units hold."""
        return cls(
            stages={name: summed(one.stages[name] for one in each) for name in STAGES},
            total=summed(one.total for one in each),
            tokens=summed(one.tokens for one in each),
            longest=max((one.longest for one in each), default=0),
            tail=max((one.tail for one in each), default=0),
            segments=max((one.segments for one in each), default=0),
            moved_codes=any(one.moved_codes for one in each),
        )


def simulate(
    units: Sequence[Unit], evictions: Evictions | None, *, context: int, new_tokens: int, mass: bool, scores: int
) -> list[Holding]:
    """Return what the units hold, one after the other; of plans that share a budget by scores, all in one.

    Args:
        units: all of the plan's.
        evictions: of the plan; None where nothing is evicted.
        context: tokens of the prompt.
        new_tokens: decoded ones.
        mass: attention mass is kept for each slot.
        scores: so many numbers of the last eviction are kept for each token.
    """
    told = partial(Holding.of, mass=mass, scores=scores)
    if evictions is None:
        return [told(layer) for layer in _run(units, None, None, context, new_tokens, "no")]
    if evictions.known != "sum":
        return _by_cases(units, evictions, partial(_known_cuts, evictions, units), context, new_tokens, told)
    return [_of_sum(units, evictions, context, new_tokens, told)]


def _by_cases(
    units: Sequence[Unit],
    evictions: Evictions,
    cuts: Cuts,
    context: int,
    new_tokens: int,
    told: Callable[[LayerForecast], Holding],
) -> list[Holding]:
    """What each unit holds, whether or not all heads happen to keep the same number where the text decides it."""
    run = partial(_run, units, evictions, cuts, context, new_tokens)
    plain = run("no")
    cases = [[told(layer)] for layer in plain]
    if any(layer.may_stay_tail and layer.each is None for layer in plain):
        for whole in ("least", "most"):
            for found, layer in zip(cases, run(whole), strict=True):
                found.append(told(layer))
    return [Holding.either(found) for found in cases]


def _known_cuts(
    evictions: Evictions, units: Sequence[Unit], seen: int, now: Sequence[LayerForecast]
) -> list[KeptCount | None]:
    held: list[list[int]] = []
    for layer in now:
        each, more = divmod(layer.held.high // layer.rows, layer.heads)
        of_row = [each + (head < more) for head in range(layer.heads)]
        held += [of_row if layer.each is None else list(layer.each[: layer.heads])] * layer.segments.layers
    kept = evictions.kept(seen, held)
    return [kept[unit.layers[-1]] for unit in units]


def _run(
    units: Sequence[Unit],
    evictions: Evictions | None,
    cuts: Cuts | None,
    context: int,
    new_tokens: int,
    whole: Whole,
) -> list[LayerForecast]:
    """The units after a prompt that was read at once, and decoded tokens one by one."""
    now = [unit.make(whole=whole) for unit in units]
    clock, slack = Clock(), None if evictions is None else evictions.plan.slack_tokens
    for step, tokens in enumerate([context, *[1] * new_tokens]):
        clock.growth += tokens
        many, due = tokens > 1, clock.is_due(slack, tokens)
        for layer in now:
            layer.append(tokens, exactly=evictions is not None and many)
        if due and evictions is not None and cuts is not None:
            seen = context + step
            recent = evictions.recent(seen)
            for layer, kept in zip(now, cuts(seen, now), strict=True):
                if kept is None:
                    layer.keep_all()
                else:
                    layer.cut(kept, recent, decoded=not many)
            clock.settle(slack, seen)
        for layer in now:
            layer.encode_tail(tokens)
    return now


def _of_sum(
    units: Sequence[Unit],
    evictions: Evictions,
    context: int,
    new_tokens: int,
    told: Callable[[LayerForecast], Holding],
) -> Holding:
    """What all units hold where the text decides how a known sum is split over the layers.

    Each unit is gone through with different numbers of tokens. Where it holds g(s) bytes with s tokens, all together
    hold a * sum(s) + sum(g(s) - a * s), whatever a is; the last sum is bounded by the least and the most of its terms,
    and the closest bounds of several a are taken.
    """
    rows, heads = evictions.rows, evictions.shapes[0].heads
    owners, layers = rows * heads, len(evictions.shapes)
    last = _last_cut(evictions, context, new_tokens)
    recent, capacity = evictions.recent(last), context
    total = max(evictions.total(last), recent * heads * layers)
    exact = evictions.plan.select.exact
    if exact and total >= capacity * heads * layers:
        return Holding.together(
            _by_cases(units, evictions, lambda seen, now: [None] * len(now), context, new_tokens, told)
        )
    spare = heads - 1 if evictions.plan.allocate.even_heads else 0
    alike = evictions.plan.allocate.even_heads and rows == 1
    low = max(total - spare, recent * heads * layers) if exact else heads * layers * max(1, recent)
    if evictions.plan.scope == "progressive" and last > context:
        # A layer that is cut before those behind it cannot get back what these leave over.
        low = min(low, heads * layers * max(1, recent))
    sums = Bounds(min(low, total) * rows, total * rows)
    least, most = max(recent, 0) * owners, capacity * owners
    most = min(most, sums.high - (layers - 1) * least)
    step = owners if alike else 1
    if alike:
        sums = Bounds(-(-sums.low // owners) * owners, sums.high // owners * owners)
        most = most // owners * owners
    grid = _points(least, max(least, most), step, window=recent * owners, owners=owners)
    if layers == 1:
        grid = [sums.low, sums.high]
    found = []
    kinds: dict[int, list[Holding]] = {}
    for unit in units:
        sample = unit.make(whole="no")
        if id(sample.segments) not in kinds:
            kinds[id(sample.segments)] = [
                _by_cases([unit], evictions, partial(_given_cut, tokens, exact, alike), context, new_tokens, told)[0]
                for tokens in grid
            ]
        found.append(id(sample.segments))
    sizes = [unit.make(whole="no").segments.layers for unit in units]
    multiple = max(unit.make(whole="no").segments.multiple for unit in units)
    # Between two numbers of the grid bytes grow evenly, but for steps of one group in each row and head, or of a page.
    loose = owners * (1 + multiple) if alike else owners + -(-256 // multiple) * multiple

    def over_all(stage: str | None) -> Bounds:
        own = {
            kind: [case.total if stage is None else case.stages[stage] for case in cases]
            for kind, cases in kinds.items()
        }
        return _bounded([own[kind] for kind in found], sizes=sizes, grid=grid, sums=sums, step=step, loose=loose)

    stages, whole = {name: over_all(name) for name in STAGES}, over_all(None)
    if last > context and exact:
        passed = _simulate_passed([unit.make(whole="no") for unit in units], recent, context, new_tokens)
        stages = {name: _widened(each, passed[name]) for name, each in stages.items()}
        whole = _widened(whole, passed["all"])
    since = (context + new_tokens - last) * owners * layers
    return Holding(
        stages=stages,
        total=whole,
        tokens=sums + Bounds.exactly(since),
        longest=context + new_tokens,
        tail=max(case.tail for cases in kinds.values() for case in cases),
        segments=max(case.segments for cases in kinds.values() for case in cases),
        moved_codes=any(case.moved_codes for cases in kinds.values() for case in cases),
    )


def _simulate_passed(
    layers: Sequence[LayerForecast], recent: int, context: int, new_tokens: int
) -> dict[str, tuple[int, int]]:
    """Bytes that may be less, and more, where layers keep all that they hold at some of several evictions.

    Such a layer's tail is not made anew: it has other spare slots, and tokens that others have in segments.
    """
    found = dict.fromkeys((*STAGES, "all"), (0, 0))
    for each in layers:
        slots, codec = each.segments.layers * each.owners, each.codec
        spare = capacity_for(context) - context
        waiting = max(0, codec.tail + codec.block - recent) if codec.block else 0
        of_token, column = each.token_bytes + 4, 5
        more = {
            "tail": (spare * of_token + column * context, (spare + waiting + new_tokens) * of_token),
            "encode": ((waiting + new_tokens) * of_token * 2, 0),
            "observe": (0, 8 * (new_tokens + spare)),
            "all": (spare * of_token + column * new_tokens, (spare + waiting) * of_token + 8 * (new_tokens + spare)),
        }
        found = {
            name: (less + slots * more[name][0], most + slots * more[name][1]) for name, (less, most) in found.items()
        }
    return found


def _widened(bounds: Bounds, by: tuple[int, int]) -> Bounds:
    return Bounds(max(0, bounds.low - by[0]), bounds.high + by[1])


def _given_cut(
    tokens: int, exact: bool, alike: bool, seen: int, now: Sequence[LayerForecast]
) -> list[KeptCount | None]:
    """A cut that leaves so many tokens in the one layer that there is; all of it stays where it holds no more."""
    layer = now[0]
    if tokens >= layer.held.high and exact:
        return [None]
    return [KeptCount(min(tokens, layer.held.high), min(tokens, layer.held.high), alike=alike or layer.owners == 1)]


def _last_cut(evictions: Evictions, context: int, new_tokens: int) -> int:
    """Tokens seen at the last eviction."""
    slack = evictions.plan.slack_tokens
    return context if slack is None else context + new_tokens // (slack + 1) * (slack + 1)


def _points(least: int, most: int, step: int, *, window: int, owners: int) -> list[int]:
    """Numbers of tokens from `least` to `most`, all of them where they are few.

    Args:
        least, most: tokens of one layer.
        step: every number is `least` and a multiple of it.
        window: tokens of the recent window, which are in no page.
        owners: rows times kv heads.
    """
    count = (most - least) // step
    if count <= 2 * _GRID:
        return list(range(least, most + 1, step))
    places = {count * i // _GRID for i in range(_GRID + 1)}
    # Where all tokens stay, a layer is another thing than where one is missing.
    places |= {1, count - 1}
    # Where the size of a page changes (`page_size`), bytes leap.
    for page in (16, 32, 64, 128):
        at = (24 * page * owners + window - least) // step
        places |= {place for place in (at - 1, at, at + 1, at + 2) if 0 < place < count}
    return [least + step * place for place in sorted(places)]


def _bounded(
    cases: Sequence[Sequence[Bounds]],
    sizes: Sequence[int],
    grid: Sequence[int],
    sums: Bounds,
    step: int,
    loose: int,
) -> Bounds:
    """Bounds of the sum of what units hold, from what each holds with each number of tokens of the grid.

    Args:
        cases: of each unit its bytes, by the number of tokens of one of its layers.
        sizes: of each unit, how many layers it has, with as many tokens each.
        grid: numbers of tokens, ascending.
        sums: tokens over all layers.
        step: numbers between two of the grid are multiples of it.
        loose: how many tokens the bytes between two numbers of the grid may be off the straight line.
    """
    if len(grid) == 1 or len(set(grid)) == 1:
        return summed(hull(*each) for each in cases)
    inner = max(1, len(grid) - 2)
    rate = max(0.0, (cases[0][inner].high - cases[0][0].low) / (grid[inner] - grid[0]) / sizes[0])
    kinds = Counter((id(each), layers) for each, layers in zip(cases, sizes, strict=True))
    own = {id(each): each for each in cases}
    # (rates,) at once.
    of_token = rate * (0.5 + torch.arange(2 * _RATES + 1, dtype=torch.float64) / _RATES)
    low, high = of_token * sums.low, of_token * sums.high
    for (kind, layers), count in kinds.items():
        off = _off_the_line(own[kind], grid, of_token * layers, step, loose)
        low, high = low + count * off[0], high + count * off[1]
    # Sums of bytes are whole; what is beyond is the rounding of the rate.
    least = max(0, ceil(low.max().item() - _ROUNDING))
    return Bounds(least, max(least, floor(high.min().item() + _ROUNDING)))


def _off_the_line(
    cases: Sequence[Bounds], grid: Sequence[int], rates: Tensor, step: int, loose: int
) -> tuple[Tensor, Tensor]:
    """(rates,) least and most of what a unit's bytes are off each rate times its tokens, over all numbers of tokens."""
    tokens = torch.tensor(grid, dtype=torch.float64)
    on_line = rates[:, None] * tokens
    # (rates, numbers of tokens)
    lows = torch.tensor([each.low for each in cases], dtype=torch.float64) - on_line
    highs = torch.tensor([each.high for each in cases], dtype=torch.float64) - on_line
    low, high = lows.amin(1), highs.amax(1)
    gaps = tokens.diff()
    between = (gaps > step).nonzero()[:, 0]
    if len(between):
        gap = gaps[between]
        width, some = rates[:, None] * gap, rates[:, None] * gap.clamp(max=loose)
        below, above = lows[:, between], lows[:, between + 1]
        # Bytes also grow with tokens, so between two numbers they lie between those of the two.
        low = torch.minimum(low, torch.maximum(torch.minimum(below, above) - some, below - width).amin(1))
        below, above = highs[:, between], highs[:, between + 1]
        high = torch.maximum(high, torch.minimum(torch.maximum(below, above) + some, above + width).amax(1))
    return low, high
