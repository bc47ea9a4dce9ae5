"""The short way of a decoded token through a compressed layer, where nothing but the token is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.hf.mask import LazyMask

if TYPE_CHECKING:
    from kvtailor.hf.layers.compressed import CompressedLayer

__all__ = ["attend_steadily"]


def attend_steadily(
    layer: CompressedLayer, query: Tensor, mask: LazyMask | Tensor | None, scaling: float
) -> Tensor | None:
    """Return the attention (b, 1, q, dv) of a decoded token, where the layer is as it was after the last one.

    None where anything is otherwise; nothing has changed then, and `CompressedLayer.attend` is the general way.

    Args:
        layer: whose new keys and values have come.
        query: (b, q, t, d) post-RoPE, as the model gives it.
        mask: of the model.
        scaling: the model's own factor before the softmax.
    """
    steady, state, guard, new = layer.steady, layer.state, layer.guard, layer.arriving
    if steady is None or new is None or query.requires_grad or torch.is_autocast_enabled(query.device.type):
        return None
    step, softmax = steady.step, state.model.softmax
    if not step.asks(query) or scaling != step.scaling:
        return None
    visible = _that_hides_nothing(mask, query, state.stored.seen)
    if visible is None:
        return None
    if (
        softmax.softcap != step.softcap
        or guard.observers
        or guard.real is not None
        or layer.recorded_after
        or torch.get_num_threads() != step.threads
        or not step.takes(*new)
        or not steady.holds(guard.engine, state)
    ):
        layer.steady = None
        return None
    guard.attention_begins(layer.layer_idx)
    layer.arriving = None
    guard.layer_changes(layer.layer_idx)
    guard.take_padding(layer.layer_idx, visible)
    output = steady.take(state, query, *new, softmax.sinks)
    guard.layer_ends(layer.layer_idx)
    return output


def _that_hides_nothing(mask: LazyMask | Tensor | None, query: Tensor, seen: int) -> LazyMask | None:
    """The mask of one new token that sees all of the `seen` before it; None where this one is something else."""
    if mask is None:
        return LazyMask.causal(query.shape[0], 1, seen, query.device)
    if isinstance(mask, LazyMask) and mask.new_tokens == 1 and mask.first_column == seen and mask.causal_only:
        return mask
    return None
