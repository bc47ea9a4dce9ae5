"""Attention over keys that a layer keeps as the model made them, where transformers' sdpa is not the model's own.

transformers' sdpa knows neither a cap nor sinks, so models that have them run its eager attention, which writes down
every logit. Here a layer with a window of the model's own, and any cache but ours, are read as our segments are: by a
kernel where tokens are few, in blocks of queries where they are many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.mask import LazyMask, TensorMask
from kvtailor.ops.attention.parts import read_all
from kvtailor.types import Layout, PlainSegment, Softmax, Visibility

__all__ = ["own_attention"]

# Queries of a layer with a window that are read at once: what lies before their windows is left out.
_BLOCK = 512
# Up to so many queries the mask is the one tensor that all layers of a forward share.
_FEW = 64
# What transformers and users put where a token may not be seen.
_HIDDEN = -1e4


def own_attention(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: LazyMask | Tensor | None,
    scaling: float | None,
    softmax: Softmax,
    dropout: float,
    **given: Any,
) -> Tensor:
    """Return the attention (b, t, q, dv) of a layer whose keys no plan compresses.

    Args:
        module: the layer's attention.
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv).
        mask: of the forward, by slots of the keys.
        scaling: factor before the softmax; None for 1 / sqrt(d).
        softmax: what the softmax has besides.
        dropout: of probabilities, while training.
        given: what else the module handed over.

    Raises:
        UnsupportedModel: a `position_bias` comes with it.
        CacheMisuse: the mask adds numbers to logits that it does not hide.
    """
    if given.get("position_bias") is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} adds a position_bias to logits that it caps, or that share with sinks; kvtailor "
            "does not support both"
        )
    factor = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = given.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if mask is None and causal and query.shape[2] > 1:
        # As transformers' sdpa: the queries are the first of the keys.
        keys, values = keys[:, :, : query.shape[2]], values[:, :, : query.shape[2]]
    visible = _visible(mask, query, keys.shape[2], causal=causal)
    sinks = given.get("s_aux")
    learning = [each for each in (query, keys, values, sinks) if each is not None and each.requires_grad]
    if dropout or (torch.is_grad_enabled() and learning):
        output = _with_gradients(query, keys, values, visible, factor, softmax.softcap, sinks, dropout)
        return output.transpose(1, 2).contiguous()
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        output = _in_blocks(query, keys, values, mask, visible, factor, softmax)
    return output.transpose(1, 2).contiguous()


def _in_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: LazyMask | Tensor | None,
    visible: Visibility,
    scaling: float,
    softmax: Softmax,
) -> Tensor:
    """(b, q, t, dv), each block of queries over the slots that a window may show it."""
    t, n = query.shape[2], keys.shape[2]
    if not isinstance(mask, LazyMask) or mask.local_size is None or t <= _BLOCK:
        return _read(query, keys, values, visible, scaling, softmax)
    assert isinstance(visible, LazyMask)
    out = query.new_empty((query.shape[0], t, query.shape[1], values.shape[-1])).transpose(1, 2)
    for first in range(0, t, _BLOCK):
        end = min(first + _BLOCK, t)
        # The columns of the block's queries, as slots; no window reaches further back, and no query sees what follows.
        column = mask.first_column - mask.kv_offset
        low, high = max(0, column + first - mask.local_size), min(n, column + end)
        rule = visible.mask_function
        here = replace(
            visible,
            new_tokens=end - first,
            first_column=visible.first_column + first,
            mask_function=lambda row, head, asked, slot, rule=rule, low=low: rule(row, head, asked, slot + low),
        )
        sides = keys[:, :, low:high], values[:, :, low:high]
        out[:, :, first:end] = _read(query[:, :, first:end], *sides, here, scaling, softmax)
    return out


def _read(query: Tensor, keys: Tensor, values: Tensor, visible: Visibility, scaling: float, softmax: Softmax) -> Tensor:
    b, h, n, _ = keys.shape
    layout = Layout(rows=b, heads=h, size=n, start=0)
    part = PlainSegment(layout=layout, keys=keys.flatten(0, 1), values=values.flatten(0, 1))
    return read_all(query, [part], visible, scaling, softmax=softmax).output


def _visible(mask: LazyMask | Tensor | None, query: Tensor, slots: int, *, causal: bool) -> Visibility:
    """What queries (b, q, t, d) may see of so many slots, by the number of each slot."""
    b, _, t, _ = query.shape
    if isinstance(mask, LazyMask):
        if t > _FEW:
            return _by_slots(mask)
        mask, causal = mask.dense(query.device), True
    if mask is None:
        if causal or t == 1:
            return LazyMask.causal(b, t, slots - t, query.device)
        mask = torch.ones((1, 1, t, slots), dtype=torch.bool, device=query.device)
    mask = mask[..., :slots]
    if mask.dtype != torch.bool:
        added = mask[(mask != 0) & (mask > _HIDDEN)]
        if added.numel():
            raise CacheMisuse(
                f"this attention_mask adds numbers to logits that it does not hide ({float(added[0]):g} among them), "
                "and kvtailor takes a mask that hides tokens or does not; pass a boolean one, or 0 and -inf"
            )
    return TensorMask.of(mask, t, slots)


def _by_slots(mask: LazyMask) -> LazyMask:
    """The rule of a forward with the slots of a layer, which may begin at a later column, in place of the columns."""
    rule, padding, offset = mask.mask_function, mask.padding, mask.kv_offset
    if padding is not None and padding.shape[1] < mask.kv_length + offset:
        # Slots that a cache of a fixed size has not filled.
        padding = torch.nn.functional.pad(padding, (0, mask.kv_length + offset - padding.shape[1]), value=False)

    def sees(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        seen = rule(row, head, query, slot + offset)
        return seen if padding is None else seen & padding.to(slot.device)[row, slot + offset]

    return replace(mask, mask_function=sees, padding=None, kv_offset=0, _dense=None, _is_dense=False)


def _with_gradients(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visibility,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """(b, q, t, dv) with every logit written down, as the model's own eager attention does, for training."""
    b, q, t, _ = query.shape
    h, n = keys.shape[1:3]
    asked = query.unflatten(1, (h, q // h)).float()
    # (b, h, g, t, n).
    logits = asked @ keys[:, :, None].float().transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    device = query.device
    sees = visible.at(torch.arange(b, device=device), torch.arange(n, device=device)[None])
    sees = sees.expand(b, t, n)[:, None, None]
    logits = logits.masked_fill(~sees, torch.finfo(torch.float32).min)
    shares = logits.softmax(-1)
    if sinks is not None:
        shares = shares * (logits.logsumexp(-1, keepdim=True) - sinks.float().view(h, q // h, 1, 1)).sigmoid()
    shares = torch.nn.functional.dropout(shares * sees.any(-1, keepdim=True), p=dropout)
    return (shares @ values[:, :, None].float()).flatten(1, 2).to(query.dtype)
