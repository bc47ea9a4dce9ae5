"""The fast path of a decoded token through a compressed layer, where nothing but the token is new."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.engine.fast_path import FastPath
from kvtailor.engine.state import LayerState
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.mask import LazyMask

__all__ = ["WithFastPath"]


class WithFastPath:
    """A layer that has the fast path.

    Attributes:
        guard: of the cache.
        state: what the layer holds.
        layer_idx: of the model.
        arriving: see `CompressedLayer`.
        arriving_for: what `fast_path` was when these came, if they are of its shape and dtype.
        recorded_after: tokens that had been seen when recording began, until the forward after that; else 0.
        fast_path: what the next decoded token needs, while the layer stays what it is; None: to be worked out.
    """

    guard: CacheGuard
    state: LayerState
    layer_idx: int
    arriving: tuple[Tensor, Tensor] | None
    arriving_for: FastPath | None = None
    recorded_after: int = 0
    fast_path: FastPath | None = None

    def attend_on_fast_path(self, query: Tensor, mask: LazyMask | Tensor | None, scaling: float) -> Tensor | None:
        """Return the attention (b, 1, q, dv) of a decoded token, where the layer is as it was after the last one.

        None where anything is otherwise; nothing has changed then, and `CompressedLayer.attend` is the slow path.

        Args:
            query: (b, q, t, d) post-RoPE, as the model gives it.
            mask: of the model.
            scaling: the model's own factor before the softmax.
        """
        fast_path, state, guard, new = self.fast_path, self.state, self.guard, self.arriving
        if (
            fast_path is None
            or new is None
            or fast_path is not self.arriving_for
            or query.requires_grad
            or torch.is_autocast_enabled(query.device.type)
        ):
            return None
        step, softmax = fast_path.step, state.model.softmax
        if not step.asks(query) or scaling != step.scaling:
            return None
        visible = _that_goes_on(mask, query, state.stored.seen, guard, self.layer_idx)
        if visible is None:
            return None
        if (
            softmax.softcap != step.softcap
            or guard.observers
            or self.recorded_after
            or torch.get_num_threads() != step.threads
            or not fast_path.holds(guard.engine, state)
        ):
            self.fast_path = None
            return None
        guard.attention_begins(self.layer_idx, changing=True)
        self.arriving = None
        guard.take_padding(self.layer_idx, visible)
        output = fast_path.take(state, query, *new, softmax.sinks)
        guard.layer_ends(self.layer_idx)
        return output


def _that_goes_on(
    mask: LazyMask | Tensor | None, query: Tensor, seen: int, guard: CacheGuard, layer: int
) -> LazyMask | None:
    """The mask of one new token that sees all of the `seen` before it but the padding that the last forward had.

    None where this one is something else.
    """
    if mask is None:
        return LazyMask.causal(query.shape[0], 1, seen, query.device) if guard.real is None else None
    if not isinstance(mask, LazyMask) or mask.new_tokens != 1 or mask.first_column != seen or not mask.only_padding:
        return None
    if mask.padding is None and guard.real is None:
        return mask
    if layer == guard.first_compressed:
        # Once for a forward: the layers share its mask, and this one is the first to see it.
        mask.continues = _continues(guard.real, mask)
    return mask if mask.continues else None


def _continues(before: Tensor | None, mask: LazyMask) -> bool:
    """Whether a mask hides the padding of the forward before it, and no new token.

    Args:
        before: (b, columns) bool of that forward, False for padding; None where nothing was.
        mask: of this forward.
    """
    now = mask.real
    if before is None or now is None:
        return before is now
    old = before.shape[1]
    return before.shape[0] == now.shape[0] and torch.equal(now[:, :old], before) and bool(now[:, old:].all())
