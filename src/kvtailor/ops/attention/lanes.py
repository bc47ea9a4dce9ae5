"""Attention of few queries over lanes: one float32 softmax over all parts, whatever their lanes are.

The logits of every part are kept (they are small where queries are few), so the softmax is taken once over all of them,
parts need no merge of their own, and the probabilities are at hand where their sums are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.lanes.pieces import pieces
from kvtailor.types import PLAIN_SOFTMAX, Lift, Softmax

__all__ = ["Lanes", "joint"]

# Elements of the float32 scratch into which half-precision keys are widened: 4 MiB stays in the shared cache.
# Measured 2^16 to 2^20 (bfloat16 keys of 8 heads x 8192 x 128): 2^19 and 2^20 are fastest, 2^16 takes twice as long.
_SCRATCH = 1 << 20
# Up to this many query rows `keys @ rows^T` is faster than `rows @ keys^T` in float32 (2 times at 4 rows; MKL packs
# the larger operand otherwise), from 12 rows on it is slower.
_FEW = 8
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """One part as attention sees it.

    Attributes:
        keys: (m, s, d), any strides between lanes.
        values: (m', s, r); see `SegmentView`.
        owner: (m,) int64 row * h + head of each lane; None where lane i belongs to owner i.
        visible: bool that broadcasts to (m, t, s); None where every query sees every slot.
        log_weight, lift, shared, more_keys: see `SegmentView`.
    """

    keys: Tensor
    values: Tensor
    owner: Tensor | None = None
    visible: Tensor | None = None
    log_weight: Tensor | None = None
    lift: Lift | None = None
    shared: Tensor | None = None
    more_keys: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether keys, values and what is visible are all there is."""
        return self.log_weight is None and self.lift is None and self.shared is None and self.more_keys is None


def joint(
    query: Tensor,
    parts: Sequence[Lanes],
    scaling: float,
    *,
    weight: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """Attention of queries over all slots of all parts.

    Args:
        query: (n, g, t, d) the group's queries of each owner, n = b * h, any dtype.
        parts: at least one; all of one dtype.
        scaling: factor before the softmax.
        weight: (n, t) float32: how much each query counts for the mass; None: no mass is wanted.
        softmax: whose cap is taken; its sinks are not, since there may be more parts elsewhere.
        sinks: (n, g, 1) float32 sinks that join these parts; None: none.

    Returns:
        out (n, g, t, dv) float32, zeros where a query sees nothing; lse (n, g, t) float32 over slots and sinks, -inf
        where there are neither; and for each part the column mass (m, s) float32, or None.
    """
    # A group's query heads and its new tokens are one axis of rows, g * t long, token innermost: all of them read the
    # same keys, so one product with the keys serves them all.
    owners, group, new, size = query.shape
    rows = (query.float() * scaling).reshape(owners, group * new, size)
    scores = [_scores(rows, part, new, softmax) for part in parts]
    # (n, g * t): each row's greatest logit over all parts. Lanes of one owner meet by scatter, since an owner has
    # several where heads hold different numbers of tokens.
    top = rows.new_full((owners, group, new), -torch.inf) if sinks is None else sinks.expand(owners, group, new).clone()
    top = top.view(owners, group * new)
    sink = None if sinks is None else top.clone()
    for part, score in zip(parts, scores, strict=True):
        highest = score.amax(-1)
        if part.owner is None:
            top = torch.maximum(top, highest)
        else:
            top.scatter_reduce_(0, part.owner[:, None].expand_as(highest), highest, "amax")
    # A row that sees nothing has the greatest logit -inf; shifted by 0 its weights are exp(-inf) = 0 and not NaN.
    shift = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.zeros_like(top) if sink is None else sink.sub_(shift).exp_()
    width = parts[0].values.shape[-1] if parts[0].lift is None else parts[0].lift.matrix.shape[-1]
    out = rows.new_zeros((owners, group * new, width))
    for part, score in zip(parts, scores, strict=True):
        # In place: from here on the scores (m, g * t, s) are weights, which the mass below reads again.
        score.sub_(_of(shift, part.owner)[..., None]).exp_()
        share, sums = score.sum(-1), _mix(score, part.values, part.shared, exact=query.dtype == torch.float32)
        if part.owner is not None and part.lift is None:
            total.index_add_(0, part.owner, share)
            out.index_add_(0, part.owner, sums)
            continue
        # A lift is one matrix for each kv head, so sums are lifted once for each owner and not for each of its lanes.
        if part.owner is not None:
            share = torch.zeros_like(total).index_add_(0, part.owner, share)
            sums = out.new_zeros((*out.shape[:2], sums.shape[-1])).index_add_(0, part.owner, sums)
        total += share
        out += sums if part.lift is None else part.lift.of_sums(sums, share)
    # Where nothing is seen both are 0, and the clamp makes the quotient 0.
    out /= total.clamp_min(_TINY)[..., None]
    lse = shift + total.log()
    mass = None
    if weight is not None:
        # (n, t) becomes (n, g * t), in the order of the rows: the tokens of the first query head, then of the next.
        share = weight.repeat(1, group) / total.clamp_min(_TINY)
        mass = [
            torch.bmm(_of(share, part.owner)[:, None], score)[:, 0] for part, score in zip(parts, scores, strict=True)
        ]
    return out.view(owners, group, new, -1), lse.view(owners, group, new), mass


def _of(each: Tensor, owner: Tensor | None) -> Tensor:
    return each if owner is None else each.index_select(0, owner)


def _scores(rows: Tensor, part: Lanes, new: int, softmax: Softmax) -> Tensor:
    """(m, g * t, s) float32 logits of the owners' rows (n, g * t, d), -inf where a query does not see a slot."""
    mine = _of(rows, part.owner)
    keys, more = part.keys, part.more_keys
    lanes, slots, size = keys.shape
    score = _products(mine[..., :size], keys)
    if more is not None:
        # A sum over all channels of a key is the sum over those that lie here and those that lie there.
        score += _products(mine[..., size:], more)
    softmax.cap_(score)
    if part.log_weight is not None:
        score += part.log_weight[:, None]
    if part.visible is not None:
        # Rows apart as (g, t) again, since what is visible depends on the token and not on the query head.
        score.view(lanes, -1, new, slots).masked_fill_(~part.visible[:, None], -torch.inf)
    return score


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """(m, g * t, s) float32 products of rows (m, g * t, d) float32 with keys (m, s, d)."""
    found = rows.new_empty((rows.shape[0], rows.shape[1], keys.shape[1]))
    if keys.dtype == torch.float32:
        _product(rows, keys, found)
        return found
    # 16-bit products would round the logits themselves to 8 bits; a float32 copy of all keys would be page-faulted anew
    # at every token. So keys are widened piece by piece into one small scratch.
    for (lane, last), (slot, end), wide in _widened(keys):
        _product(rows[lane:last], wide, found[lane:last, :, slot:end])
    return found


def _product(rows: Tensor, keys: Tensor, out: Tensor) -> None:
    if rows.shape[1] <= _FEW:
        out.copy_(torch.bmm(keys, rows.transpose(1, 2)).transpose(1, 2))
    elif out.is_contiguous():
        torch.bmm(rows, keys.transpose(1, 2), out=out)
    else:
        out.copy_(torch.bmm(rows, keys.transpose(1, 2)))


def _mix(weights: Tensor, values: Tensor, shared: Tensor | None = None, *, exact: bool) -> Tensor:
    """(m, g * t, r) float32: values (m', s, r) weighted with (m, g * t, s) float32, which `exact` does not round."""
    if shared is not None:
        # The c kv heads that share a lane of values: their weights (m', c, g * t, s) as c * g * t rows of one product.
        together = _mix(weights[shared].flatten(1, 2), values, exact=exact).unflatten(1, (shared.shape[1], -1))
        out = weights.new_empty((*weights.shape[:2], values.shape[-1]))
        out[shared] = together
        return out
    if values.dtype == torch.float32:
        return torch.bmm(weights, values)
    if not exact and (values.dtype != torch.float16 or values.device.type != "cpu"):
        return torch.bmm(weights.to(values.dtype), values).float()
    # Nor has torch a fast float16 matrix product on the CPU: 4 to 16 times slower than widening first.
    out = weights.new_zeros((values.shape[0], weights.shape[1], values.shape[2]))
    for (lane, last), (slot, end), wide in _widened(values):
        out[lane:last].baddbmm_(weights[lane:last, :, slot:end], wide)
    return out


def _widened(states: Tensor) -> Iterator[tuple[tuple[int, int], tuple[int, int], Tensor]]:
    """Pieces of states (m, s, d) as float32 in one scratch: their lanes (first, end), their slots (first, end)."""
    lanes, slots, size = states.shape
    # A piece has at least one whole slot, and so up to d elements more than the limit where d is larger than that.
    scratch = torch.empty(min(lanes * slots * size, _SCRATCH + size), dtype=torch.float32, device=states.device)
    for lane, slot in pieces(lanes, slots, size, _SCRATCH):
        piece = states[lane, slot]
        wide = scratch[: piece.numel()].view(piece.shape)
        yield (lane.start, lane.stop), (slot.start, slot.stop), wide.copy_(piece)
