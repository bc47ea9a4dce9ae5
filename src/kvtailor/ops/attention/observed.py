"""Attention of observed queries over what one row and kv head holds: no padding, no filler, one lane at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtailor.types import PLAIN_SOFTMAX, Held, Softmax

__all__ = ["lane_attention", "mean_attention", "observed_queries", "window_attention", "window_means"]


def lane_attention(
    queries: Tensor,
    columns: Tensor,
    keys: Tensor,
    positions: Tensor,
    scaling: float,
    log_weight: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Causal attention probabilities of some queries over one lane.

    Args:
        queries: (g, m, d) of a group's query heads.
        columns: (m,) int64 columns of the queries.
        keys: (n, d).
        positions: (n,) int64 columns of the keys.
        scaling: factor before the softmax.
        log_weight: (n,) see `Held.log_weight`.
        softmax: of these query heads, what it has besides the factor.

    Returns:
        (g, m, n) float32; rows sum to 1 less the sink's share, those of a query that sees no key are zeros.
    """
    group, count, size = queries.shape
    # (g * m, d) times (d, n), since all heads of a group read the same keys.
    rows = (queries.float() * scaling).reshape(group * count, size)
    given = (rows @ keys.float().t()).view(group, count, keys.shape[0])
    softmax.cap_(given)
    if log_weight is not None:
        given += log_weight
    unseen = positions > columns[:, None]
    # (m, n) beside (g, m, n). A finite fill, whose softmax over nothing else is even and not NaN; those rows end as 0.
    given.masked_fill_(unseen, torch.finfo(torch.float32).min)
    softmax.probabilities_(given)
    blind = unseen.all(-1)
    # Most often there is none, and what looks costs less than what fills; a device would wait for the host.
    if given.device.type == "cpu" and not blind.any():
        return given
    return given.masked_fill_(blind[:, None], 0.0)


def observed_queries(held: Held, method: str, window: int) -> tuple[Tensor, Tensor]:
    """The newest queries of a forward, and their columns.

    Args:
        held: what a method was given.
        method: its name and what it does, the first words of an error.
        window: queries that it declared to need.

    Returns:
        (b, q, w, d) and (w,) int64.

    Raises:
        ValueError: none were gathered.
    """
    if held.queries is None or held.query_columns is None:
        raise ValueError(
            f"{method} the last {window} queries, but none were gathered; observe with Needs(window={window})"
        )
    return held.queries, held.query_columns


def window_attention(held: Held, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Attention of the newest queries of a row over the tokens of one kv head.

    A query takes part if some head holds its own token, so what padding looks at counts for nothing.

    Args:
        held: with `queries`.
        row: of the batch.
        head: a kv head.

    Returns:
        (g, v, n) float32 probabilities of the v queries that take part over the n tokens, neither padding nor filler
        among them; (n,) bool: which of the tokens are older than the window.
    """
    assert held.queries is not None and held.query_columns is not None
    group = held.queries.shape[1] // held.keys.shape[1]
    there = held.there(row, head)
    keys, positions = held.keys[row, head][there], held.positions[row, head][there]
    queries, columns = held.queries[row, head * group : (head + 1) * group], held.query_columns
    if not held.holds_window:
        own = held.held_by_any(row)
        queries, columns = queries[:, own], columns[own]
    weight = None if held.log_weight is None else held.log_weight[row, head][there]
    given = lane_attention(queries, columns, keys, positions, held.scaling, weight, held.softmax_of(head))
    return given, positions < held.query_columns[0]


def window_means(held: Held, of: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean of a function of each probability row of the window, over the queries and the group.

    Args:
        held: with `queries`.
        of: from the rows (v, n) of one query head to numbers (v,).

    Returns:
        (b, h) float32; 1 where no query of a row takes part, as if each saw a single token.
    """
    rows, heads = held.keys.shape[:2]
    found = torch.ones((rows, heads), dtype=torch.float32, device=held.keys.device)
    for row in range(rows):
        for head in range(heads):
            given, _ = window_attention(held, row, head)
            if given.numel():
                found[row, head] = torch.stack([of(one) for one in given]).mean()
    return found


def mean_attention(held: Held, row: int) -> Tensor:
    """Attention of a row's newest queries, averaged over all query heads.

    Args:
        held: with `queries`.
        row: of the batch.

    Returns:
        (v, n) float32 for the v queries that take part (see `window_attention`), a column for each token that any head
        holds, padding left out.
    """
    assert held.queries is not None and held.query_columns is not None
    query_heads, heads = held.queries.shape[1], held.keys.shape[1]
    group = query_heads // heads
    if held.front is not None and bool((held.front[row] == held.seen).all()):
        # Each head holds all that was seen.
        tokens = held.positions[row, 0, : held.seen]
    else:
        tokens = torch.unique(held.positions[row][held.valid[row]])
    if held.share.ranks > 1:
        # Heads of other processes may hold other tokens: (seen,) how many processes have a head that holds a column.
        holding = torch.zeros(held.seen, device=tokens.device, dtype=torch.float32)
        holding[tokens] = 1.0
        tokens = held.share.sum(holding).nonzero()[:, 0]
    queries, columns = held.queries[row], held.query_columns
    if not held.holds_window:
        own = held.held_by_any(row)
        queries, columns = queries[:, own], columns[own]
    total = torch.zeros((columns.shape[0], tokens.shape[0]), dtype=torch.float32, device=held.keys.device)
    for head in range(heads):
        there = held.there(row, head)
        keys, positions = held.keys[row, head][there].float(), held.positions[row, head][there]
        weight = None if held.log_weight is None else held.log_weight[row, head][there]
        # Heads hold the same tokens until they are given different budgets; their columns then need no search.
        place = None if positions.shape == tokens.shape else torch.searchsorted(tokens, positions)
        for query in range(head * group, (head + 1) * group):
            softmax = held.softmax.of_heads(query, 1)
            one = queries[query : query + 1]
            given = lane_attention(one, columns, keys, positions, held.scaling, weight, softmax)[0]
            total = total.add_(given) if place is None else total.index_add_(1, place, given)
            del given
    return held.share.sum(total).div_(held.share.total(query_heads))
