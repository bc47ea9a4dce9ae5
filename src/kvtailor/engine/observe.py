"""The stage `observe`: queries and attention of a forward -> the evidence that the plan's methods need.

Gathering evidence over a prompt in pieces gives the same result as at once. No n x n matrix is ever held: a window
keeps w queries, a sample at most m, moments one d x d matrix for each query head, a mass one number for each held
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Moments, Needs, Rotation, Visibility
from kvtailor.types.evidence import Evidence
from kvtailor.types.visibility import first_real, real_before

__all__ = ["observe", "real_queries", "windowed"]

# Queries of a prompt are widened to float32 so many at a time, to keep the scratch small.
_BLOCK = 256


def observe(
    needs: Needs,
    evidence: Evidence,
    query: Tensor,
    first_column: int,
    mass: Sequence[Tensor] | None,
    *,
    real: Tensor | None = None,
    rotation: Rotation | None = None,
    others: Sequence[tuple[Tensor, int]] = (),
) -> Evidence:
    """Return the evidence after one forward.

    The window and the moments include queries of other modules that read the same layer (`others`). Samples are of the
    layer's own queries.

    Args:
        needs: what the methods declared.
        evidence: what was gathered before.
        query: (b, q, t, d) post-RoPE queries of this forward.
        first_column: column of the first of them.
        mass: for each part (m, s) the attention that it received in this forward; None if `needs.mass` is False.
        real: (b, first_column + t) bool: False for columns of padding; None: there is no padding.
        rotation: the layer's rotary embedding, for moments.
        others: queries (b, q, t', d) of each of these modules and the column of the first; t' may be less than t.

    Returns:
        New evidence; `evidence` does not change. Its tensors share no storage with `query`.

    Raises:
        ValueError: mass or a rotation is needed and was not given.
    """
    if needs.window:
        if others:
            evidence = _windowed_together(needs.window, evidence, [(query, first_column), *others])
        else:
            evidence = windowed(needs.window, evidence, query, first_column)
    if needs.mass:
        if mass is None:
            raise ValueError("the scorer needs attention mass, and the attention gave none")
        old = [*evidence.mass, *[None] * len(mass)]
        evidence = replace(evidence, mass=tuple(_add(was, now) for was, now in zip(old, mass, strict=False)))
    if needs.rows:
        evidence = _sampled(needs.rows, evidence, query, first_column, real)
    if needs.moments:
        if rotation is None:
            raise ValueError("the plan needs queries before their rotation, and the layer knows no rotation")
        for more, first in [(query, first_column), *others]:
            columns = torch.arange(more.shape[2], device=more.device) + first
            ages = _ages(columns, real, more.shape[0])
            if real is not None:
                # (b, 1, t): as if all padding of a row lay before its first real token.
                columns = (ages + first_real(real).to(ages.device)[:, None])[:, None]
            evidence = _with_moments(needs.moments_skip, evidence, more, columns, ages, rotation)
    return evidence


def windowed(window: int, evidence: Evidence, query: Tensor, first_column: int) -> Evidence:
    """Return the evidence with the newest `window` queries, those of this forward (b, q, t, d) included."""
    count, end, before = query.shape[2], first_column + query.shape[2], evidence.queries
    new = query.detach() if query.requires_grad else query
    new = new if count <= window else new[:, :, -window:]
    missing, device = window - new.shape[2], query.device
    if before is None or evidence.columns is None or not missing:
        span = range(end - new.shape[2], end)
        columns = torch.arange(span.start, end, device=device)
        return replace(evidence, queries=new.clone(), columns=columns, span=span)
    stays = min(missing, before.shape[2])
    new = torch.cat([before.narrow(2, before.shape[2] - stays, stays), new], 2)
    first, joins = end - new.shape[2], evidence.span is not None and evidence.span.stop == first_column
    if joins:
        return evidence.with_newest(new, torch.arange(first, end, device=device), range(first, end))
    columns = torch.cat([evidence.columns[-missing:], torch.arange(first_column, end, device=device)])
    return replace(evidence, queries=new, columns=columns, span=None)


def _windowed_together(window: int, evidence: Evidence, new: Sequence[tuple[Tensor, int]]) -> Evidence:
    """Return the queries of the newest `window` columns, by column; several modules have one for each column."""
    queries = [] if evidence.queries is None else [evidence.queries]
    columns = [] if evidence.columns is None else [evidence.columns]
    for query, first in new:
        queries.append(query[:, :, -window:])
        columns.append(torch.arange(query.shape[2], device=query.device)[-window:] + first)
    every = torch.cat(columns)
    order = every.argsort(stable=True)
    order = order[every[order] > every.max() - window]
    found = torch.cat(queries, 2)[:, :, order].detach()
    return replace(evidence, queries=found, columns=every[order], span=None)


def _add(old: Tensor | None, now: Tensor) -> Tensor:
    """Return `old` (m, s) + `now` (m, s'), s' >= s; tokens that came since start from 0."""
    if old is None:
        return now
    total = now.clone()
    total[:, : old.shape[1]] += old
    return total


def _ages(columns: Tensor, real: Tensor | None, rows: int) -> Tensor:
    """Return (b, t) int64: how many real tokens of the row came before each; negative for padding."""
    if real is None:
        return columns.expand(rows, -1)
    return real_before(real.to(columns.device))[:, columns]


def _sampled(most: int, evidence: Evidence, query: Tensor, first_column: int, real: Tensor | None) -> Evidence:
    """Keep every s-th real query of each row, s the least power of two that leaves at most `most`.

    Which queries stay depends only on how many were seen, and not on pieces or padding. The host does not wait for the
    device, which alone knows how many tokens of a padded row are real.
    """
    b, q, t, d = query.shape
    device, end, held, old = query.device, first_column + t, evidence.sampled, evidence.sampled_columns
    columns = torch.arange(first_column, end, device=device)
    stride: int | Tensor
    if real is None:
        stride = _stride(end, most)
        joins = -first_column % stride < t
        if held is not None and not joins and stride == _stride(first_column, most):
            return evidence
        every, ages = columns.expand(b, -1), columns.expand(b, -1)
        before = old
    else:
        aged = real_before(real.to(device))
        seen, stride = aged.amax(-1, keepdim=True) + 1, torch.ones((b, 1), dtype=torch.int64, device=device)
        for _ in range(_stride(end, most).bit_length() - 1):
            stride = torch.where(seen > most * stride, 2 * stride, stride)
        every, ages = columns.expand(b, -1), aged[:, first_column:]
        before = None if old is None else aged.gather(1, old.clamp(min=0)).masked_fill(old < 0, -1)
    if held is not None and old is not None and before is not None:
        every, ages = torch.cat([old, every], 1), torch.cat([before, ages], 1)
    # Of those held and those that came, (b, m + t) in time order, the places of the ones that stay come first.
    stays = (ages >= 0) & (ages % stride == 0)
    place = torch.argsort((~stays).to(torch.uint8), dim=1, stable=True)[:, :most]
    here = stays.gather(1, place)
    sampled, chosen = query.new_zeros((b, q, most, d)), columns.new_full((b, most), -1)
    count, older = place.shape[1], every.shape[1] - t
    found = query.gather(2, (place - older).clamp(min=0)[:, None, :, None].expand(b, q, count, d))
    if held is not None and older:
        kept = held.gather(2, place.clamp(max=older - 1)[:, None, :, None].expand(b, q, count, d))
        found = torch.where((place < older)[:, None, :, None], kept, found)
    sampled[:, :, :count] = found.masked_fill(~here[:, None, :, None], 0)
    chosen[:, :count] = every.gather(1, place).masked_fill(~here, -1)
    return replace(evidence, sampled=sampled.detach(), sampled_columns=chosen)


def _stride(seen: int, most: int) -> int:
    """Return the least power of two s of which at most `most` multiples are below `seen`."""
    stride = 1
    while seen > most * stride:
        stride *= 2
    return stride


def _with_moments(
    skip: int, evidence: Evidence, query: Tensor, columns: Tensor, ages: Tensor, rotation: Rotation
) -> Evidence:
    """Update count, mean and spread by the new queries (pairwise update of Chan, Golub and LeVeque)."""
    b, q, t, d = query.shape
    found = evidence.moments
    if found is None:
        zeros = torch.zeros((b, q, d, d), dtype=torch.float32, device=query.device)
        found = Moments(count=zeros[:, 0, 0, 0].clone(), mean=zeros[..., 0].clone(), spread=zeros)
    count, mean, spread = found.count, found.mean, found.spread
    for first in range(0, t, _BLOCK):
        here = slice(first, first + _BLOCK)
        counts = (ages[:, here] >= skip).to(torch.float32)
        before = turn(query[:, :, here].float(), -columns[..., here], rotation)
        new = counts.sum(-1)
        new_mean = (counts[:, None, None] @ before)[:, :, 0] / new.clamp(min=1)[:, None, None]
        apart = before.sub_(new_mean[:, :, None]).mul_(counts[:, None, :, None])
        step, total = new_mean - mean, count + new
        share = (new / total.clamp(min=1))[:, None, None]
        spread = spread + apart.transpose(2, 3) @ apart
        spread = spread + (count * new / total.clamp(min=1))[:, None, None, None] * step[..., None] * step[..., None, :]
        mean, count = mean + share * step, total
    return replace(evidence, moments_count=count, moments_mean=mean, moments_spread=spread)


def real_queries(visible: Visibility) -> Tensor | None:
    """Return (b, t) bool: which new tokens are no padding; None: there is no padding."""
    if visible.real is None:
        return None
    return visible.real[:, visible.first_column : visible.first_column + visible.new_tokens]
