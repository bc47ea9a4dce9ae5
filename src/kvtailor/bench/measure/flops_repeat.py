"""What repeating a context costs, for plans that read it twice: operations from shapes, as in `flops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.run.prefill import instruction_of, repetitions

if TYPE_CHECKING:
    from kvtailor.bench.measure.weights import Weights

__all__ = ["repetition_flops", "twice_pairs"]


def twice_pairs(tokens: int, window: int | None) -> int:
    """Twice the (query, key) pairs of a causal prompt, its diagonal counted half: n**2, less what a window hides."""
    hidden = 0 if window is None else max(0, tokens - window)
    return tokens**2 - hidden**2


def repetition_flops(
    weights: Weights, geometry: Geometry, cache: Any, tokenizer: Any, *, rows: int, tokens: int
) -> int:
    """Operations of the passes that repeat `rows` contexts of `tokens` tokens; 0 for a plan that reads once.

    A pass of t new tokens after n is a prefill of n + t less one of n. Then, for each layer that sees all, each query
    head and each new token, 2 d + 4 for every sink, token of the piece and earlier new token: its logit, and its
    softmax (less the maximum, exponential, sum, division); the highest probability is chosen for nothing. Where a plan
    takes gradients, each pass is run once more and then backward: as much again for what multiplies weights, whose own
    gradients are not taken, and twice as much for attention, which has two factors.
    """
    engine = getattr(cache, "engine", None)
    how = None if engine is None else engine.needs.reconstruction
    if how is None or not geometry.compressed:
        return 0
    context, words = torch.zeros((1, tokens), dtype=torch.int64), instruction_of(tokenizer)
    total = 0
    for piece, new in repetitions(context, None, words, how, geometry.max_positions):
        t, known = new.shape[1], piece.columns[0].numel()
        known += int((piece.sinks[0] < piece.columns[0][0]).sum())
        attention = sum(
            s.q_heads
            * (s.key_size + s.value_size)
            * (twice_pairs(tokens + t, s.window) - twice_pairs(tokens, s.window))
            for s in geometry.shapes
            if s.kv_heads
        )
        total += 2 * (weights.body * t + weights.head) + attention
        if how.graded:
            total += 2 * (2 * weights.body * t + weights.head) + 3 * attention
        looked_at = (2 * t * known + twice_pairs(t, None)) // 2
        total += len(geometry.compressed) * geometry.q_heads * looked_at * (2 * geometry.head_dim + 4)
    return rows * total
