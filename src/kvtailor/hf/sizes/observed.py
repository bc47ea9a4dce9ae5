"""What layers remember for a plan's methods beside tokens: queries, sums over queries, what an attention carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtailor.attend.contract import Attention
from kvtailor.hf.sizes.bounds import NOTHING, Bounds
from kvtailor.types import Needs

if TYPE_CHECKING:
    from kvtailor.hf.model.shapes.layer_shapes import LayerShape
    from kvtailor.plan import Plan

__all__ = ["carried_bytes", "evidence_bytes", "keeps_queries"]


def keeps_queries(plan: Plan) -> bool:
    """Return whether queries stay once a token was decoded, because a later eviction or encoding may need them."""
    return plan.slack_tokens is not None or plan.encode.needs.window > 0


def evidence_bytes(
    plan: Plan, shape: LayerShape, *, rows: int, element_size: int, context: int, new_tokens: int, readers: int
) -> Bounds:
    """Return the bytes of one layer's evidence, without the mass and the scores of single tokens (`observe`).

    Args:
        plan: whose methods need it.
        shape: of the layer.
        rows: b.
        element_size: bytes of an element of the cache's dtype.
        context: tokens of the prompt.
        new_tokens: that were decoded.
        readers: other layers of the model that read this one, whose queries may join its window.
    """
    needs: Needs = plan.needs
    found = NOTHING
    queries, size = rows * shape.q_heads, shape.query_size
    # A prompt of a single token counts as a decoded one; a prompt that is repeated is evicted from once.
    if (new_tokens == 0 and context > 1 and needs.reconstruction is None) or keeps_queries(plan):
        if needs.window:
            window = min(needs.window, context + new_tokens)
            each = window * (queries * size * element_size + 8)
            found += Bounds(each, each * (1 + readers))
        if needs.rows:
            found += Bounds.exactly(needs.rows * (queries * size * element_size + 8 * rows))
        if needs.moments:
            found += Bounds.exactly(4 * (rows + queries * size + queries * size**2))
    if needs.reconstruction is not None and plan.slack_tokens is not None:
        found += Bounds.exactly(4 * rows * shape.kv_heads * context)
    return found


def carried_bytes(
    attend: Attention,
    shape: LayerShape,
    *,
    rows: int,
    element_size: int,
    held: Bounds,
    longest: int,
    context: int,
    new_tokens: int,
) -> tuple[Bounds, Bounds]:
    """Return the bytes of what one layer's attention carries along, and of the counts of what it has read.

    Args:
        attend: the plan's attention.
        shape: of the layer.
        rows: b.
        element_size: bytes of an element of the cache's dtype.
        held: tokens of the layer, over all rows and kv heads.
        longest: most tokens that one row and kv head holds.
        context: tokens of the prompt.
        new_tokens: that were decoded.
    """
    low, high = attend.carried_bytes(
        rows=rows,
        heads=shape.kv_heads,
        q_heads=shape.q_heads,
        size=shape.key_size,
        element_size=element_size,
        held=(held.low, held.high),
        longest=longest,
        context=context,
        new_tokens=new_tokens,
    )
    counts = 8 * rows * shape.kv_heads if attend.has_token_budget and new_tokens else 0
    return Bounds(low, high), Bounds(0, counts)
