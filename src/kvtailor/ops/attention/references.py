"""Reference queries: those by whose attention what is held is chosen, or fitted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.lanes.kept import places_of
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Held

__all__ = ["Matched", "matched", "reference_queries"]

# Elements of the float32 logits at a time: 1 MiB.
_SCRATCH = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Matched:
    """How the reference queries attend one row and kv head, in shares of the attention over all that it holds.

    Attributes:
        shares: (r, t) float32: what each query gives each of the tokens that may change, in time order.
        values: (t, dv) theirs, as they are held.
        whole: (r, 1) float64: the sum over those tokens and all that are dropped.
        summed: (r, dv) float64: the sum of these tokens' values, each times its share.
        rest: (r, 1) float64: what all others have, a learned sink among them. A query that sees nothing has 0 in all.
        others: (r, dv) float64: what these others add to the output.
    """

    shares: Tensor
    values: Tensor
    whole: Tensor
    summed: Tensor
    rest: Tensor
    others: Tensor


def reference_queries(held: Held, row: int, head: int, *, turned: bool) -> tuple[Tensor, Tensor]:
    """All queries that a method was given, of one kv head's group: repeated, spread over the row, and the newest.

    Args:
        held: with any of them, and the rotation where they are to be turned.
        row: of the batch.
        head: a kv head.
        turned: those that are spread over the row stand for later ones: they are turned to the column behind the newest
            token, so that they do not look for what stood beside them, and see all. Else they see what they saw.

    Returns:
        (g, m, d) float32 post-RoPE queries, and (m,) int64 their columns: a query sees no later token. The column -1,
        which sees none, is that of padding, of filler, and of a query of the window whose own token no head holds.
    """
    queries, columns = [], []
    heads = held.keys.shape[1]
    if held.repeated is not None and held.repeated_columns is not None:
        queries.append(held.repeated[row].unflatten(0, (heads, -1))[head].float())
        own = held.repeated_columns[row]
        columns.append(own.masked_fill(own >= 0, held.seen))
    if held.sampled is not None and held.sampled_columns is not None:
        spread, own = held.sampled[row].unflatten(0, (heads, -1))[head].float(), held.sampled_columns[row]
        if turned:
            assert held.rotation is not None
            spread, own = turn(spread, held.seen - own, held.rotation), own.masked_fill(own >= 0, held.seen)
        queries.append(spread)
        columns.append(own)
    if held.queries is not None and held.query_columns is not None:
        queries.append(held.queries[row].unflatten(0, (heads, -1))[head].float())
        own = held.query_columns
        columns.append(own if held.holds_window else own.masked_fill(~held.held_by_any(row), -1))
    every = torch.cat(columns)
    found = torch.cat(queries, 1)
    return found.masked_fill_((every < 0)[:, None], 0.0), every


def matched(
    held: Held, row: int, head: int, keep: Tensor, into: Tensor, *, turned: bool, changing: int | None = None
) -> Matched:
    """What the reference queries see of the tokens of one row and kv head.

    Args:
        held: with reference queries.
        row: of the batch.
        head: a kv head.
        keep: (n,) bool: tokens that are not dropped.
        into: (n,) bool, among them: tokens that may change.
        turned: see `reference_queries`.
        changing: how many may change; None: the host waits to count.
    """
    keys, values, positions = held.keys[row, head], held.values[row, head], held.positions[row, head]
    weight = None if held.log_weight is None else held.log_weight[row, head]
    # (n',) places of the tokens; states are picked a block at a time.
    there = torch.arange(keys.shape[0], device=keys.device)[held.there(row, head)]
    queries, columns = reference_queries(held, row, head, turned=turned)
    # (r, d) and (r, 1): the queries of one head after those of another.
    rows, until = queries.flatten(0, 1) * held.scaling, columns.repeat(queries.shape[0])[:, None]
    softmax = held.softmax_of(head)

    def logits(some: Tensor) -> Tensor:
        given = softmax.cap_(rows @ keys[some].float().t())
        given = given if weight is None else given + weight[some]
        return given.masked_fill_(positions[some] > until, -torch.inf)

    # The largest logit of each query so far; the sums are in units of its exponential.
    top = torch.full_like(rows[:, :1], torch.finfo(torch.float32).min)
    size = values.shape[-1]
    sums = rows.new_zeros((rows.shape[0], 2 * size + 2), dtype=torch.float64)
    step = max(1, _SCRATCH // max(1, rows.shape[0]))
    for here in there.split(step):
        given = logits(here)
        larger = torch.maximum(top, given.amax(-1, keepdim=True))
        given = given.sub_(larger).exp_()
        sums *= (top - larger).exp_()
        top = larger
        fixed = (keep[here] & ~into[here])[:, None]
        one = torch.cat([values[here].float(), torch.ones_like(fixed, dtype=torch.float32)], -1)
        # (s, 2 * (dv + 1)): a token is counted on the left where it is matched, else on the right.
        sums += given @ torch.cat([one.masked_fill(fixed, 0.0), one.masked_fill(~fixed, 0.0)], -1)
    if softmax.sinks is not None:
        sinks = softmax.sinks.repeat_interleave(columns.shape[0])[:, None]
        larger = torch.maximum(top, sinks)
        sums *= (top - larger).exp_()
        top = larger
        # A query that sees no token gives nothing to a sink either: no output of it is to be matched.
        sees = (sums[:, size] + sums[:, -1] > 0)[:, None]
        sums[:, -1:] += (sinks - top).exp_() * sees
    summed, whole, others, rest = sums.split([size, 1, size, 1], -1)
    total = whole + rest
    scale = torch.where(total > 0, 1 / total, 0.0)
    matching = there[places_of(into[there], changing)]
    shares = logits(matching).sub_(top).exp_().mul_(scale.float())
    return Matched(
        shares=shares,
        values=values[matching],
        whole=whole * scale,
        summed=summed * scale,
        rest=rest * scale,
        others=others * scale,
    )
