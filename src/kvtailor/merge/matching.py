"""Matching: weights and values of kept tokens are fitted, so that they are attended as all tokens were.

*Idea*: what later tokens need of a dropped part is two things for each query: how much attention the part gets, and
the mean of its values under that attention. Reference queries say what both were. Each kept token gets a factor in the
softmax, so that the kept ones together get the attention of all; then their values are changed, so that what they give
is what all gave. Keys stay as they are.

*Paper*: zweiger2026matching, "Fast KV Compaction via Attention Matching", arXiv 2602.16284. Factors w by non-negative
least squares, sum_j w_j exp(q k_j) = the sum over all; then values V by least squares, softmax(q K + log w) V = the
attention output; both over reference queries q, of a repetition of the context among others; factors from e^-3 to e^3.

*Source*: its repository adamzweiger/compaction (MIT) for facts, the bounds among them; nothing was taken.

*Departs*: the recent window, and what is there as a code alone, cannot change, so what is matched are the other tokens.
A query counts by the share of its attention that these get (the repository divides by its largest exponential). There
are a few hundred queries and not 50,000, often fewer than kept tokens, so both fits have a ridge, toward 1 for factors
and toward the value that a token has; the repository has none, clamps unbounded factors and takes two gradient steps.
By default queries are the newest, and some spread over the text, turned to where the next token stands; `repeat` takes
those of a repetition besides (`kvzip` has how it is made), once: later cuts have the others. A head whose fitted tokens
would come no closer to its outputs over the reference queries than dropping comes is left as dropped; outputs are
compared by themselves, and beside later tokens that get as much attention as all before. At a later cut earlier weights
count in what is matched, and the bounds are those of each cut's factor. Layers are fitted by queries of the
uncompressed context, and not one after the other on what those before became ("on-policy").

*Cost*: the queries that it asks for, held until decoding begins (with `slack`, for good); a weight of 4 bytes for each
kept token. For each kv head r = g * queries rows: 2 r n (d + dv) operations for what is matched, in blocks of tokens,
then about ten systems of r equations, each 2 r^2 k for k kept tokens; scratch two times (r, k) float32, of several
heads where they fit 4 MiB. With `repeat` the context is read twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvtailor.merge.contract import Merged, Merger
from kvtailor.method import Serves
from kvtailor.ops.attention.references import Matched, matched
from kvtailor.ops.lanes.kept import kept_first, kept_states, places_of
from kvtailor.ops.least_squares import bounded_factors, product, ridge_change
from kvtailor.types import Held, Needs, Repetition
from kvtailor.types.late_checks import send

__all__ = ["Matching"]

Fit = Literal["both", "weights", "values"]

# Elements of the shares of several heads that are fitted together.
_SCRATCH = 1 << 20
# A share of attention that is none; and a ridge, where no query sees any token that may change.
_LEAST = 1e-20


@dataclass(frozen=True, kw_only=True)
class Matching(Merger):
    """Fits weights and values.

    Attributes:
        window: newest queries that are matched.
        spread: at most so many queries spread over the text that are matched besides.
        turned: spread queries are turned to where the next token stands, and see all; else they see what they saw.
        repeat: at most so many queries of a repetition of the context that are matched besides; 0: it is read once.
        ridge: of both fits, in mean squared lengths of a token's column of shares.
        bound: largest absolute logarithm of the factor that a token gets at one cut.
        fit: "both", or only the "weights" or only the "values".
    """

    window: int = 32
    spread: int = 128
    turned: bool = True
    repeat: int = 0
    ridge: float = 1.0
    bound: float = 3.0
    fit: Fit = "both"
    weighted: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("matching", "matching(spread=0, fit=values)")
    serves: ClassVar[Serves] = Serves(latents="it changes values and not keys, and a latent is both at once")

    def __post_init__(self) -> None:
        if min(self.window, self.spread, self.repeat) < 0 or not self.window + self.spread + self.repeat:
            raise ValueError(
                "matching: window, spread and repeat must be 0 or more and give at least one query, found "
                f"{self.window}, {self.spread} and {self.repeat}"
            )
        if not 0 < self.ridge < math.inf:
            raise ValueError(f"matching: ridge must be above 0, found {self.ridge}; a tiny one is next to none")
        if not 0 < self.bound < 80:
            raise ValueError(f"matching: bound must be above 0 and below 80, found {self.bound}; the paper's is 3")
        if self.fit not in get_args(Fit):
            raise ValueError(f"matching: fit must be one of {', '.join(get_args(Fit))}, found {self.fit!r}")

    @property
    def needs(self) -> Needs:
        repetition = Repetition(chunk=2048, lead=8, sinks=4, queries=self.repeat) if self.repeat else None
        return Needs(window=self.window, rows=self.spread, rotation=self._turns, reconstruction=repetition)

    @property
    def _turns(self) -> bool:
        return self.turned and self.spread > 0

    def merge(self, held: Held, keep: Tensor, into: Tensor) -> Merged:
        """See the contract.

        Raises:
            ValueError: no queries were gathered.
        """
        lacking = (self.window and held.queries is None) or (self.spread and held.sampled is None)
        if lacking or (self._turns and held.rotation is None):
            raise ValueError(
                f"matching fits to the last {self.window} queries and {self.spread} spread ones"
                f"{', which it turns' if self._turns else ''}, and did not get all of it; observe with {self.needs}"
            )
        index, filled = kept_first(keep, held.kept)
        keys, values = kept_states(held.keys, index, filled), kept_states(held.values, index, filled)
        log_weight = torch.zeros_like(keep, dtype=torch.float32) if held.log_weight is None else held.log_weight
        log_weight = log_weight.gather(-1, index).masked_fill_(~filled, 0.0)
        takes = into.gather(-1, index) & filled
        if not self.window + self.spread and held.repeated is None:
            # The repetition is gone when decoded tokens are cut.
            return Merged(keys=keys, values=values, log_weight=log_weight)
        for lanes in self._together(held, keep, into, takes):
            self._change(lanes, values, log_weight)
            # Their shares take most room, and those of the next heads come now.
            lanes.clear()
        return Merged(keys=keys, values=values, log_weight=log_weight)

    def _change(self, lanes: Sequence[_Lane], values: Tensor, log_weight: Tensor) -> None:
        """Put what the tokens of some heads become where they are better: values (b, h, k, dv), weights (b, h, k)."""
        sizes = [lane.at.shape[0] for lane in lanes]
        factors, fitted, better = self._fitted([lane.seen for lane in lanes], max(sizes))
        for number, (lane, size) in enumerate(zip(lanes, sizes, strict=True)):
            row, head, at = lane.row, lane.head, lane.at
            was, weight = values[row, head, at], log_weight[row, head, at]
            values[row, head, at] = torch.where(better[number], fitted[number, :size], was)
            grown = weight + factors[number, :size].log().float()
            log_weight[row, head, at] = torch.where(better[number], grown, weight)

    def _together(self, held: Held, keep: Tensor, into: Tensor, takes: Tensor) -> Iterator[list[_Lane]]:
        """Heads that are fitted together: those that drop some tokens, and have others that may take them in."""
        lanes: list[_Lane] = []
        rows, heads = keep.shape[:2]
        counts = [[held.merging(row, head, all_take=into is keep) for head in range(heads)] for row in range(rows)]
        if any(None in each for of_row in counts for each in of_row):
            # (b, h, 2) on the host, which waits for it once.
            counts = torch.stack([takes.sum(-1), (held.valid & ~keep).sum(-1)], -1).tolist()
        for row in range(rows):
            for head in range(heads):
                taking, leaving = counts[row][head]
                if not taking or not leaving:
                    continue
                at = places_of(takes[row, head], taking)
                widest = max(at.shape[0], *(each.at.shape[0] for each in lanes), 1)
                if lanes and (len(lanes) + 1) * lanes[0].seen.shares.shape[0] * widest > _SCRATCH:
                    yield lanes
                    lanes = []
                # No name of its own: it would outlive its turn.
                lanes.append(_Lane(row=row, head=head, at=at, seen=self._seen(held, row, head, keep, into, taking)))
        if lanes:
            yield lanes

    def _seen(self, held: Held, row: int, head: int, keep: Tensor, into: Tensor, taking: int) -> Matched:
        return matched(held, row, head, keep[row, head], into[row, head], turned=self._turns, changing=taking)

    def _fitted(self, lanes: Sequence[Matched], widest: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the tokens of some heads become.

        Returns:
            (l, t) float64 factors; (l, t, dv) values in the dtype of what was held; (l,) bool: they come closer to the
            outputs over the reference queries (`_distance`) than the tokens as they are.
        """
        # One head alone is not copied: its shares are what takes most room.
        shares = lanes[0].shares[None]
        if len(lanes) > 1:
            shares = torch.stack([_wide(each.shares, widest, 1) for each in lanes])
        values = torch.stack([_wide(each.values, widest, 0) for each in lanes])
        whole, summed = torch.stack([each.whole for each in lanes]), torch.stack([each.summed for each in lanes])
        rest, others = torch.stack([each.rest for each in lanes]), torch.stack([each.others for each in lanes])
        count = send(torch.tensor([each.shares.shape[1] for each in lanes]), shares.device)
        before, factors = values.double(), torch.ones(values.shape[:2], dtype=torch.float64, device=values.device)
        left = product(shares, factors[..., None])
        aim = others + summed, rest + whole
        dropped = _distance((others + product(shares, before), rest + left), aim)
        if self.fit != "values":
            low, high = math.exp(-self.bound), math.exp(self.bound)
            factors = bounded_factors(shares, whole[..., 0], ridge=self._ridge_of(shares, count), low=low, high=high)
            left = product(shares, factors[..., None])
        fitted = values
        if self.fit != "weights":
            # Of each query the mean of the values under its attention, times the share that all these tokens had.
            some = left > _LEAST
            even = torch.where(some, whole / left.clamp_min(_LEAST), 0.0)
            weighing = (shares * factors[:, None].float()).mul_(even.float())
            missing = summed * some - product(weighing, before)
            fitted = (before + ridge_change(weighing, missing, ridge=self._ridge_of(weighing, count))).to(values.dtype)
        now = _distance((others + product(shares, factors[..., None] * fitted.double()), rest + left), aim)
        return factors, fitted, now < dropped

    def _ridge_of(self, columns: Tensor, count: Tensor) -> Tensor:
        """(l,) float64: the ridge for columns (l, r, t), of which `count` (l,) are tokens."""
        squared: Tensor = torch.linalg.vector_norm(columns, dim=(1, 2), dtype=torch.float64).square()
        return (self.ridge * squared / count).clamp_min(_LEAST)


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """A row and kv head whose tokens are fitted: `at` (t,) are their places among the kept ones."""

    row: int
    head: int
    at: Tensor
    seen: Matched


def _distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """(l,): how far outputs are apart, squared: by themselves, and beside later tokens with as much attention again.

    Args:
        one, other: sums of values (l, r, dv) and of shares (l, r, 1), in the same unit for both.
    """
    total = torch.zeros_like(one[1][:, 0, 0])
    for later in (0.0, 1.0):
        mine, theirs = (summed / (shares + later).clamp_min(_LEAST) for summed, shares in (one, other))
        total += (mine - theirs).square().sum((1, 2))
    return total


def _wide(tensor: Tensor, widest: int, axis: int) -> Tensor:
    """The tensor with zeros behind, so that one of its axes has the size `widest`."""
    missing = list(tensor.shape)
    missing[axis] = widest - missing[axis]
    return torch.cat([tensor, tensor.new_zeros(missing)], axis)
