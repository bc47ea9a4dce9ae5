"""From what a plan says (`tokens=`, `keep=`, `bytes=`) to a whole number of tokens for each row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.ops.ragged import page_size

if TYPE_CHECKING:
    from kvtailor.layer import LayerState
    from kvtailor.plan import Plan

__all__ = ["total_tokens"]


def total_tokens(plan: Plan, tokens: Tensor, *, layers: int, template: LayerState, window_bytes: int = 0) -> Tensor:
    """Tokens that each row may hold, over all compressed layers and kv heads.

    Args:
        plan: with one of `tokens`, `keep`, `bytes`, or an attention that says what to hold.
        tokens: (b,) int64 on the CPU: real tokens seen by each row.
        layers: layers that the plan compresses.
        template: any one of them; its shapes and dtype price a token.
        window_bytes: bytes of one row that the model's own sliding windows take, which `bytes=` has to pay first.

    Returns:
        (b,) int64 on the CPU, at least one token for each layer and head.
    """
    heads = layers * template.heads
    if plan.tokens is not None:
        total = torch.full_like(tokens, plan.tokens * heads)
    elif plan.keep is not None:
        # 0.3 of 90 tokens in 12 heads are 324, which binary fractions miss by a hair.
        total = (tokens.double() * (plan.keep * heads) + 1e-6).floor().to(torch.int64)
    elif plan.bytes is not None:
        total = torch.full_like(tokens, _affordable(plan, heads, template, window_bytes))
    elif (held := plan.attend.held_tokens(tokens)) is not None:
        total = held * heads
    else:
        raise ValueError(f"the plan {plan} evicts and has no budget")
    return total.clamp(min=heads)


def _affordable(plan: Plan, heads: int, template: LayerState, window_bytes: int) -> int:
    """Tokens of one row that fit its share of `plan.bytes`, positions, tail and half-empty pages included."""
    assert plan.bytes is not None and plan.score is not None
    key_size, value_size, element = template.sizes()
    plain = (key_size + value_size) * element
    recents = plan.score.recents
    ragged = template.rows > 1 or not (plan.allocate.even_heads and plan.select.exact)
    layers = heads // template.heads
    encoded = plan.encode.mean_bytes_per_token(layers, key_size, value_size, element, heads=template.heads)
    # Each token carries its column (4 bytes), and a weight (4) where the merger gives it one; a ragged lane of s slots
    # carries 12 more, and an owner's last is half empty.
    each = encoded + (8 if plan.merge.weighted else 4)
    share = plan.bytes / template.rows - window_bytes - heads * recents * (plain + 4)
    mean = share / heads / each
    if ragged:
        page = page_size(mean, plan.encode.lane_multiple)
        each += 12 / page
        share -= heads * page * each
    fitting = math.floor(share / each) + heads * recents
    return max(fitting, 0)
