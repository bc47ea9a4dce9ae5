"""What a compressed cache holds, laid out densely beside the full one, and what attention makes of it.

The queries are the full model's own, and every layer is compared on its own: errors do not add up over layers here, so
the numbers show where a plan loses something, and the task's logits show what that costs in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.hf.cache import KvCache
from kvtailor.types import PLAIN_SOFTMAX, Softmax, Visibility

__all__ = ["LAYERWISE", "Contents", "Queries", "compare_layers", "contents", "queries_of"]

LAYERWISE = ("key_error", "value_error", "retained_mass", "attention_cosine", "output_error")


@dataclass(frozen=True)
class Contents:
    """What one layer of a cache holds for one row.

    Attributes:
        keys: (h, n, d) float32 by column, 0 where nothing is held.
        values: (h, n, dv) float32 likewise.
        held: (h, n) bool.
    """

    keys: Tensor
    values: Tensor
    held: Tensor


@dataclass(frozen=True)
class Queries:
    """The queries of one layer for one row.

    Attributes:
        states: (q, t, d) float32, post-RoPE; those of the one kv head where the layer holds latents.
        scaling: factor before the softmax.
        softmax: what it has besides, for all query heads.
    """

    states: Tensor
    scaling: float
    softmax: Softmax = PLAIN_SOFTMAX


def contents(cache: KvCache) -> list[Contents]:
    """Every compressed layer of a `KvCache` of one row, decoded; with the heads that other processes have."""
    found = []
    for state in cache.engine.states:
        parts = state.readable_parts()
        decoded = [part.decode() for part in parts]
        keys, values = (torch.zeros(state.heads, state.stored.seen, x.shape[-1]) for x in decoded[0])
        held = torch.zeros(state.heads, state.stored.seen, dtype=torch.bool)
        for part, (part_keys, part_values) in zip(parts, decoded, strict=True):
            device, layout = part_keys.device, part.layout
            columns = layout.columns(device).expand(layout.lanes, layout.size)
            heads = layout.owners(device)[:, None].expand_as(columns)
            filled = layout.filled(device)
            chosen = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
            at = heads[chosen].cpu(), columns[chosen].cpu()
            keys[at], values[at] = part_keys[chosen].float().cpu(), part_values[chosen].float().cpu()
            held[at] = True
        found.append(Contents(*(cache.share.gather(each, 0) for each in (keys, values, held))))
    return found


@contextmanager
def queries_of(cache: KvCache) -> Iterator[list[Queries]]:
    """While it is open, the queries that come to the compressed layers of a `KvCache` are kept, in layer order."""
    kept: list[Queries] = []
    state_of = dict(zip(cache.geometry.compressed, cache.engine.states, strict=True))

    def keep(layer: int, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> None:
        model = state_of[layer].model
        softmax = model.softmax
        if softmax.sinks is not None:
            softmax = Softmax(softcap=softmax.softcap, sinks=cache.share.gather(softmax.sinks.cpu(), 0))
        query = query if model.latents is None else model.latents.absorbed(query)
        kept.append(Queries(cache.share.gather(query[0].float().cpu(), 0), scaling, softmax))

    with cache.guard.observed(keep):
        yield kept


def compare_layers(full: list[Contents], ours: list[Contents], queries: list[Queries]) -> dict[str, tuple[float, ...]]:
    """Each layer's numbers, means over kv heads and queries.

    Returns:
        ``key_error``, ``value_error``: squared norm of the error over that of the true states, of the tokens held.
        ``retained_mass``: attention probability that the full cache gives to the tokens held.
        ``attention_cosine``: between the probabilities of both, 0 at dropped tokens.
        ``output_error``: norm of the difference of the attention outputs over that of the full one.
    """
    found: dict[str, list[float]] = {name: [] for name in LAYERWISE}
    for true, kept, asked in zip(full, ours, queries, strict=True):
        heads, columns = kept.held.shape
        true_keys, true_values = true.keys[:, :columns], true.values[:, :columns]
        states = asked.states.unflatten(0, (heads, -1)).flatten(1, 2)
        whole = _probabilities(states @ true_keys.mT * asked.scaling, asked.softmax, None)
        part = _probabilities(states @ kept.keys.mT * asked.scaling, asked.softmax, kept.held[:, None])
        outputs, theirs = whole @ true_values, part @ kept.values
        found["key_error"].append(_error(true_keys[kept.held], kept.keys[kept.held]))
        found["value_error"].append(_error(true_values[kept.held], kept.values[kept.held]))
        found["retained_mass"].append((whole * kept.held[:, None]).sum(-1).mean().item())
        found["attention_cosine"].append(torch.cosine_similarity(whole, part, dim=-1).mean().item())
        found["output_error"].append(((outputs - theirs).norm(dim=-1) / outputs.norm(dim=-1)).mean().item())
    return {name: tuple(values) for name, values in found.items()}


def _probabilities(products: Tensor, softmax: Softmax, held: Tensor | None) -> Tensor:
    """(h, g * t, n) of scaled products, over the tokens that are held (h, 1, n); in place."""
    logits = softmax.cap_(products)
    if held is not None:
        logits = logits.masked_fill_(~held, -torch.inf)
    if softmax.sinks is None:
        return logits.softmax(-1)
    # A head's query heads and its queries are one axis here; each query head has a sink.
    by_heads = logits.unflatten(1, (softmax.sinks.shape[0] // logits.shape[0], -1)).flatten(0, 1)
    return softmax.probabilities_(by_heads).view(logits.shape)


def _error(true: Tensor, found: Tensor) -> float:
    return ((true - found).square().sum() / true.square().sum()).item()
