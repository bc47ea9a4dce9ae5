"""Chunks of adjacent tokens: their channel-wise bounds, and from some channels of them what a query may see in each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvtailor.ops.lanes.rows import Rows, gather
from kvtailor.types import PLAIN_SOFTMAX, Softmax
from kvtailor.types.late_checks import send

__all__ = ["Reduced", "chunk_bounds", "promised", "reduce_channels", "IndexedOnHost", "indexed_on_host", "note_index"]


# Tokens of each owner whose keys are gathered at once while bounds are made.
_BLOCK = 2048


def chunk_bounds(keys: Sequence[Tensor], rows: Rows, size: Tensor) -> Tensor:
    """Greatest and least of each key channel over each chunk.

    Args:
        keys: of each part, (m, s, d).
        rows: the tokens; chunks run over their places from 0.
        size: (b * h,) int64 on the CPU: tokens of an owner's chunks; 0 where it has none.

    Returns:
        (b * h, 2 * d, c) in the dtype of the keys: row i < d is channel i's greatest, row d + i its least, by chunk.
        Zeros past an owner's last chunk. The last chunk of an owner may have fewer tokens than the others.
    """
    counts = rows.counts.cpu() if rows.on_host is None else rows.on_host
    chunks = torch.where(size > 0, -(-counts // size.clamp(min=1)), 0)
    width = keys[0].shape[-1]
    bounds = keys[0].new_zeros((counts.shape[0], 2 * width, int(chunks.max()) if chunks.numel() else 0))
    for each in size[size > 0].unique().tolist():
        mine = (size == each).nonzero()[:, 0]
        owners, longest = send(mine, rows.address.device), int(counts[mine].max())
        step = _BLOCK // each * each or each
        for first in range(0, longest, step):
            end = min(first + step, -(-longest // each) * each)
            # Filler repeats a token of its own chunk, which widens nothing: `Rows.address` repeats the last one.
            place = torch.arange(first, end, device=owners.device).clamp(max=rows.address.shape[1] - 1)
            block = gather(keys, rows.address[owners][:, place]).unflatten(1, (-1, each))
            at = slice(first // each, end // each)
            there = (
                torch.arange(at.start, at.stop, device=owners.device)[None] < send(chunks[mine], owners.device)[:, None]
            )
            both = torch.cat([block.amax(2), block.amin(2)], 2).masked_fill(~there[..., None], 0)
            bounds[owners, :, at] = both.transpose(1, 2)
    return bounds


def promised(
    query: Tensor,
    keys: Callable[[Tensor], Tensor],
    rows: Rows,
    scaling: float,
    *,
    bounds: Tensor | None,
    size: Tensor,
    covered: Tensor,
    channels: Tensor,
    softmax: Softmax = PLAIN_SOFTMAX,
    sinks: Tensor | None = None,
    loose: int | None = None,
) -> Tensor:
    """What the bounds promise that each token receives of one new token's attention.

    A chunk's logit is that of its greatest keys in channels where the group's queries sum to 0 or more, of its least in
    the others. One softmax goes over all chunks of an owner, and over its tokens without bounds, as chunks of one.

    Args:
        query: (b * h, g, d) the group's queries.
        keys: gives those at addresses (b * h, k), ascending, as (b * h, k, d).
        rows: the tokens.
        scaling: the model's own factor before the softmax.
        bounds: (b * h, 2 * d, c) from `chunk_bounds`; None where no token has any.
        size: (b * h,) int64 tokens of an owner's chunks.
        covered: (b * h,) int64 tokens of each owner, the oldest, that have bounds.
        channels: (b * h,) int64, best on the CPU: channels that are looked at, those in which the group's queries are
            largest.
        softmax: whose cap is taken. It grows with the logit, so that the cap of a bound bounds the capped logits.
        sinks: (b * h, g, 1) logits that belong to no token; None: none.
        loose: the most tokens without bounds of any owner; None: the host waits to learn it.

    Returns:
        (b * h, n) float32: the probability of each token's chunk, mean over the group's heads.
    """
    reduced = reduce_channels(query, channels, scaling)
    lowest, device = torch.finfo(torch.float32).min, query.device
    place = covered[:, None] + torch.arange(
        int((rows.counts - covered).max()) if loose is None else loose, device=device
    )
    own = keys(rows.address.gather(1, place.clamp(max=rows.address.shape[1] - 1)))
    own = own.gather(2, reduced.channels[:, None].expand(-1, own.shape[1], -1)).float()
    logits = softmax.cap_(torch.bmm(reduced.query, own.transpose(1, 2))).masked_fill(
        (place >= rows.counts[:, None])[:, None], lowest
    )
    number = 0
    if bounds is not None:
        number = bounds.shape[-1]
        row = reduced.channels + reduced.low * (bounds.shape[1] // 2)
        # Rows of (b * h * 2 d, c) are copied whole, where two indices are looked up number by number.
        at = (torch.arange(row.shape[0], device=device)[:, None] * bounds.shape[1] + row).flatten()
        chosen = bounds.flatten(0, 1).index_select(0, at).view(*row.shape, number).float()
        empty = torch.arange(number, device=device)[None] * size[:, None] >= covered[:, None]
        of_chunks = softmax.cap_(torch.bmm(reduced.query, chosen)).masked_fill(empty[:, None], lowest)
        logits = torch.cat([of_chunks, logits], 2)
    given = logits.softmax(-1) if sinks is None else torch.cat([logits, sinks], 2).softmax(-1)[..., :-1]
    received = given.mean(1)
    token = torch.arange(rows.columns.shape[1], device=device)[None]
    chunk = torch.div(token, size[:, None], rounding_mode="floor")
    at = torch.where(token < covered[:, None], chunk, number + token - covered[:, None])
    return received.gather(1, at.clamp(max=received.shape[1] - 1))


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Queries of one new token in a few channels only.

    Attributes:
        channels: (b * h, r) int64 the kept channels, those first where the group's queries are largest.
        low: (b * h, r) bool: the group's queries sum to less than 0 there, so that the least key makes the most of it.
        query: (b * h, g, r) float32 scaled so that a product with keys is a logit; 0 in channels that this owner does
            not keep.
    """

    channels: Tensor
    low: Tensor
    query: Tensor


def reduce_channels(query: Tensor, kept: Tensor, scaling: float) -> Reduced:
    """Leaves only the channels in which the group's queries are largest by their summed absolute values.

    A logit over few channels is smaller than over all, so that its softmax would be too even: it is divided by the root
    of the share of the query's absolute sum that is left, query head by query head.

    Args:
        query: (b * h, g, d) the group's queries.
        kept: (b * h,) int64 channels that each owner keeps, from 1 to d; on the CPU, or the host waits for the most.
        scaling: the model's own factor before the softmax.
    """
    query = query.float()
    most = int(kept.max())
    channels = query.abs().sum(1).topk(most).indices
    here = torch.arange(most, device=query.device)[None] < send(kept, query.device)[:, None]
    picked = query.gather(2, channels[:, None].expand(-1, query.shape[1], -1)) * here[:, None]
    share = picked.abs().sum(-1) / query.abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    factor = scaling * share.clamp(min=torch.finfo(torch.float32).eps).rsqrt()
    return Reduced(channels=channels, low=query.sum(1).gather(1, channels) < 0, query=picked * factor[..., None])


@dataclass(frozen=True, kw_only=True)
class IndexedOnHost:
    """Numbers of one index.

    Attributes:
        columns: of the carry's tensor of columns; None where there are no bounds.
        capacity: of each row.
        covered: tokens of each owner (row * h + head) that have bounds.
    """

    columns: weakref.ref[Tensor] | None
    capacity: tuple[int, ...]
    covered: tuple[int, ...]


_KNOWN = WeakTensorKeyDictionary()
"""By the carry's tensor of capacities. The engine has an index made anew where what is held changes otherwise than by
growing, so while the carry has these very tensors, all this still holds. Of copies and loaded carries nothing is known.
"""


def note_index(carry: Mapping[str, Tensor], counts: Tensor | None, capacity: Tensor, chunk: Tensor) -> None:
    """Keep what the host knows of a carry that it made.

    Args:
        carry: with "capacity", and with "columns" where there are bounds.
        counts: (b * h,) int64 on the CPU: tokens that were indexed; None: the host does not know them.
        capacity: (b,) int64 on the CPU.
        chunk: (b * h,) int64 on the CPU: tokens of a chunk, 0 where an owner has no bounds.
    """
    columns = carry.get("columns")
    if counts is None:
        _KNOWN.pop(carry["capacity"], None)
        return
    covered = torch.zeros_like(counts) if columns is None else torch.where(chunk > 0, counts, 0)
    _KNOWN[carry["capacity"]] = IndexedOnHost(
        columns=None if columns is None else weakref.ref(columns),
        capacity=tuple(capacity.tolist()),
        covered=tuple(covered.tolist()),
    )


def indexed_on_host(carry: Mapping[str, Tensor]) -> IndexedOnHost | None:
    """What the host knows of this very carry; None: nothing."""
    known, columns = _KNOWN.get(carry["capacity"]), carry.get("columns")
    if known is None or (known.columns is None) != (columns is None):
        return None
    return known if known.columns is None or known.columns() is columns else None
