"""Turning a plan's budget (`tokens=`, `keep=`, `bytes=`) into a whole number of tokens for each row."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.ops.lanes.ragged import page_size

if TYPE_CHECKING:
    from kvtailor.encode.contract import Codec
    from kvtailor.plan import Plan

_AT_ONCE = 32

__all__ = [
    "Budget",
    "CacheShape",
    "make_budget",
    "no_bytes",
    "describe_only_recent",
    "recent_tokens",
    "count_total",
    "waiting_tokens",
    "warn_of_recent",
]


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The shape of a layer's cache, which may not exist yet, over the heads of all processes.

    Attributes:
        heads: h, kv heads.
        key_size, value_size: d and dv.
        element_size: bytes of an element of the cache's dtype.
        rows: b, batch rows.
    """

    heads: int
    key_size: int
    value_size: int
    element_size: int
    rows: int = 1

    @classmethod
    def of(cls, sizes: tuple[int, int, int], *, heads: int, rows: int) -> CacheShape:
        """Return the shape of a layer; `sizes` are those of `LayerState.sizes`."""
        key_size, value_size, element_size = sizes
        return cls(heads=heads, key_size=key_size, value_size=value_size, element_size=element_size, rows=rows)

    def sizes(self) -> tuple[int, int, int]:
        """Return d, dv and the bytes of an element."""
        return self.key_size, self.value_size, self.element_size


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many tokens rows may hold.

    Attributes:
        total: (b,) int64 on the CPU: tokens over all compressed layers and kv heads.
        each: (b,) int64 on the CPU: tokens per kv head, on average.
        row_tokens: (b,) int64 on the CPU: real tokens seen.
    """

    total: Tensor
    each: Tensor
    row_tokens: Tensor


def no_bytes(element_size: int) -> int:
    """Return 0, for models all of whose layers are compressed."""
    return 0


def make_budget(
    plan: Plan,
    tokens: Tensor,
    *,
    layers: int,
    newest: CacheShape,
    other_bytes: int = 0,
    shapes: Sequence[CacheShape] = (),
) -> Budget:
    """Compute how many tokens rows may hold, for the layer that is cut now.

    Args:
        plan, tokens, layers, other_bytes, shapes: see `count_total`.
        newest: the shape of the layer that is cut now.
    """
    total = count_total(plan, tokens, layers=layers, template=newest, other_bytes=other_bytes, shapes=shapes)
    every = sum(each.heads for each in shapes) or layers * newest.heads
    # A layer is given the total that would be due if all layers had its heads: only its own share counts then.
    return Budget(total=total * (layers * newest.heads) // every, each=total // every, row_tokens=tokens)


def count_total(
    plan: Plan,
    tokens: Tensor,
    *,
    layers: int,
    template: CacheShape,
    other_bytes: int = 0,
    shapes: Sequence[CacheShape] = (),
) -> Tensor:
    """Return how many tokens each row may hold, over all compressed layers and kv heads.

    Args:
        plan: it has one of `tokens`, `keep`, `bytes`, or an attention that sets a budget.
        tokens: (b,) int64 on the CPU: real tokens seen by each row.
        layers: layers that the plan compresses.
        template: the shape of any one of them, from which the bytes of a token follow.
        other_bytes: bytes of one row that other layers take (the model's own sliding windows, states); they are
            subtracted from `bytes=` first.
        shapes: the shape of each of them, if they differ; a token then takes the bytes of its layer.

    Returns:
        (b,) int64 on the CPU, at least one token for each layer and head.
    """
    every = tuple(shapes) or (template,) * layers
    heads = sum(shape.heads for shape in every)
    if plan.tokens is not None:
        total = torch.full_like(tokens, plan.tokens * heads)
    elif plan.keep is not None:
        # 0.3 of 90 tokens in 12 heads are 324, which binary fractions miss by a hair.
        total = (tokens.double() * (plan.keep * heads) + 1e-6).floor().to(torch.int64)
    elif plan.bytes is not None:
        total = torch.full_like(tokens, _affordable(plan, every, other_bytes))
    elif (held := plan.attend.held_tokens(tokens)) is not None:
        total = held * heads
    else:
        raise ValueError(f"the plan {plan} evicts and has no budget")
    return total.clamp(min=heads)


def recent_tokens(plan: Plan, each: Tensor) -> Tensor:
    """Return how many of the newest tokens all heads of a row keep whatever their scores, (b,) int64 on the CPU.

    They are those of `Scorer.recent`, and never more than the budget allows.

    Args:
        each: (b,) int64 on the CPU: tokens that each row may hold per kv head, on average.
    """
    assert plan.score is not None
    return each.clamp(max=plan.score.recent)


def waiting_tokens(plan: Plan, codec: Codec) -> int:
    """Return how many tokens of a head a layer encodes at once while decoding, if evictions leave fewer at a time.

    Until there are so many, they wait in full precision, besides the newest ones that must stay; 0: none waits. The
    number is by how much most plans let a tail grow between two evictions, so that a plan that evicts more often holds
    no more in full precision.
    """
    slack, least = plan.slack_tokens, min(codec.block, _AT_ONCE)
    return least if slack is not None and slack + 1 < least and not codec.exact and not codec.across else 0


def describe_only_recent(*, seen: int | None, held: int, recent: int) -> str:
    """Describe a budget of `held` tokens per kv head that is used up by the `recent` newest tokens, always kept.

    The sentence has no subject, which is the plan. `seen`: tokens of the prompt; None: any longer prompt.
    """
    length = "" if seen is None else f" of {seen} tokens"
    return (
        f"nothing but the newest {held}{length} is held, no first token (the budget is {held} per kv head, and the "
        f"score always keeps the newest {recent})"
    )


def warn_of_recent(plan: Plan, budget: Budget) -> bool:
    """Warn of rows whose budgets leave nothing for the scores to decide; return whether there are any.

    Such a row holds only the newest tokens; or only the first ones, if the score ranks these above all.
    """
    assert plan.score is not None
    recent, first = plan.score.recent, plan.score.first_kept or 0
    each, tokens = budget.each, budget.row_tokens
    rows = ((each <= (recent or first)) & (tokens > each)).nonzero()[:, 0]
    if not len(rows):
        return False
    held, seen = int(each[rows[0]]), int(tokens[rows[0]])
    what = f"nothing but the first {held} of {seen} tokens is held, none of the newest"
    if recent:
        what = describe_only_recent(seen=seen, held=held, recent=recent)
    where, cure = "", f"Give more than {recent or first}"
    if len(each) > 1:
        where = f"in {len(rows)} of {len(each)} rows "
        cure = "tokens= in the place of keep= leaves short rows whole" if plan.keep is not None else cure
    warnings.warn(f"{plan}: {where}{what}. {cure}", stacklevel=3)
    return True


def _affordable(plan: Plan, shapes: Sequence[CacheShape], other_bytes: int) -> int:
    """Return how many tokens of one row fit its share of `plan.bytes`, positions, tail and half-empty pages included.

    A token takes the mean bytes over all heads of all layers, since heads hold equally many tokens on average.
    """
    assert plan.bytes is not None and plan.score is not None
    layers, rows, recent = len(shapes), shapes[0].rows, plan.score.recent
    heads = sum(shape.heads for shape in shapes)
    ragged = rows > 1 or not (plan.allocate.even_heads and plan.select.exact)

    def priced(shape: CacheShape) -> tuple[float, float]:
        """Return the bytes of a token in full precision, and encoded."""
        key_size, value_size, element = shape.sizes()
        encoded = plan.encode.mean_bytes_per_token(layers, key_size, value_size, element, heads=shape.heads)
        return (key_size + value_size) * element, encoded

    prices = {shape: priced(shape) for shape in dict.fromkeys(shapes)}
    plain, encoded = (sum(shape.heads * prices[shape][side] for shape in shapes) / heads for side in (0, 1))
    # Each token carries its column (4 bytes), and a weight (4) where the merger gives it one; a ragged lane of s slots
    # carries 12 more, and an owner's last is half empty.
    each = encoded + (8 if plan.merge.weighted else 4)
    whole = plan.bytes / rows - other_bytes
    share = whole - heads * recent * (plain + 4)
    if share < 0:
        # The window itself does not fit, so all that is held are the newest of it, as many in each head.
        return max(math.floor(whole / heads / (plain + 4)), 0) * heads
    # What waits to be encoded is in full precision: all that is not recent, or so many tokens of it.
    more = max(0.0, plain + 4 - each) * waiting_tokens(plan, plan.encode)
    share = max(share - heads * more, min(share, share * each / (plain + 4)))
    mean = share / heads / each
    if ragged:
        page = page_size(mean, plan.encode.lane_multiple)
        each += 12 / page
        share -= heads * page * each
    fitting = math.floor(share / each) + heads * recent
    return max(fitting, 0)
