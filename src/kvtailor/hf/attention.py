"""The attention function that every layer of the model calls, and how it finds the cache.

The cache never reaches an attention function. So a compressed layer's `update` gives the model, in place of
keys, an object that carries the layer as an attribute; the function reads it and calls the layer. The values in it are
NaN: where some other attention runs on it after all, the output is NaN instead of silently wrong.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvtailor.errors import CacheMisuse, PlanError, UnsupportedModel
from kvtailor.hf.handed import CLOCK, check_fed
from kvtailor.hf.layers.run_eagerly import run_eagerly
from kvtailor.hf.mask import LazyMask, lazy_mask
from kvtailor.hf.model.attending.own_layers import own_attention
from kvtailor.hf.model.attending.softmax import softmax_of
from kvtailor.hf.switch import forward_began, name_before

__all__ = [
    "HANDLE",
    "NAME",
    "PlainForwards",
    "attention",
    "counting_plain_forwards",
    "expect",
    "register",
    "uncounted",
    "ungraded",
]

NAME = "kvtailor"
HANDLE = "_kvtailor_layer"


@dataclass
class PlainForwards:
    """Forwards in which a model reads a cache that is not kvtailor's.

    Attributes:
        config: of the model, the very object.
        layer: the layer at which they are counted: one that a plan would compress.
        count: so far. A forward that reads nothing but its own tokens is none of them.
    """

    config: Any
    layer: int
    count: int = 0

    def attention_came(self, module: torch.nn.Module, query: Tensor, key: Tensor) -> None:
        """Count the attention of a layer over keys (b, h, n, d) without a handle."""
        mine = getattr(module, "config", None) is self.config
        if mine and getattr(module, "layer_idx", self.layer) == self.layer and key.shape[2] > query.shape[2]:
            self.count += 1


_COUNTED: list[PlainForwards] = []


@contextmanager
def counting_plain_forwards(config: Any, layer: int) -> Iterator[PlainForwards]:
    """Count them while it is entered."""
    found = PlainForwards(config, layer)
    _COUNTED.append(found)
    try:
        yield found
    finally:
        _COUNTED[:] = [each for each in _COUNTED if each is not found]


@contextmanager
def uncounted() -> Iterator[None]:
    """Forwards within it are kvtailor's own, and no user's, whatever cache they read."""
    before = _COUNTED[:]
    _COUNTED.clear()
    try:
        yield
    finally:
        _COUNTED[:] = before


class _Expected(threading.local):
    """For each thread the layer whose update has come and whose attention has not, where no handle leads to it."""

    layer: weakref.ref[Any] | None = None


_EXPECTED = _Expected()


def expect(layer: Any) -> None:
    """The next attention of this thread is that of `layer`, of the module that has updated it.

    For layers whose module makes other tensors of what `update` gave, so that a handle on those is lost.
    """
    _EXPECTED.layer = weakref.ref(layer)


def _expected(module: torch.nn.Module, key: Tensor) -> Any:
    """The layer that this thread expects, if module and keys are those of its model and of its place; else None."""
    reference = _EXPECTED.layer
    layer = None if reference is None else reference()
    if layer is None or getattr(module, "config", None) is not layer.guard.config:
        return None
    if getattr(module, "layer_idx", None) != layer.layer_idx or not layer.guard.awaits_attention(layer.layer_idx):
        return None
    _EXPECTED.layer = None
    return layer if layer.has_given(key) else None


@run_eagerly
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LazyMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the signature of transformers' `AttentionInterface`.

    Args:
        module: the model's attention layer.
        query: (b, q, t, d) post-RoPE.
        key, value: what the cache's `update` gave. Without the handle (no cache, transformers' own cache, or one of the
            model's sliding-window layers) this is transformers' own sdpa; `own_attention` where that cannot do it (a
            softcap, sinks).
        attention_mask: a `LazyMask`, a user's 4-D tensor, or None.
        scaling: factor before the softmax; None for 1 / sqrt(d).

    Returns:
        (b, t, q, dv), and no attention weights.
    """
    expected = _expected(module, key)
    layer = getattr(key, HANDLE, None) or expected
    if layer is None:
        for each in _COUNTED:
            each.attention_came(module, query, key)
        if key.shape[2] == query.shape[2]:
            # It reads nothing but its own tokens: a prompt, or a forward whose cache was taken away.
            check_fed(module, attention_mask)
        softmax = softmax_of(module, query.shape[1], kwargs, of_sdpa=True)
        if not softmax.plain:
            output = own_attention(module, query, key, value, attention_mask, scaling, softmax, dropout, **kwargs)
            return output, None
        mask = attention_mask.dense(query.device) if isinstance(attention_mask, LazyMask) else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    try:
        softmax = softmax_of(module, query.shape[1], kwargs)
        if dropout:
            raise CacheMisuse(
                "a compressed cache is for inference: the model asks for dropout; call model.eval() first"
            )
        layer.check_model(module)
        _check_direction(module, attention_mask)
        layer.take_softmax(softmax)
        if layer is expected:
            layer.check_states(module, key, value)
    except (CacheMisuse, PlanError, UnsupportedModel):
        layer.refuse_forward()
        raise
    if kwargs.get("output_attentions"):
        warnings.warn(
            "asked for output_attentions=True: attention over a compressed cache makes no matrix of weights, so the "
            "forward returns none",
            stacklevel=2,
        )
    factor = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    fast_path = layer.attend_on_fast_path(query, attention_mask, factor)
    if fast_path is not None:
        return fast_path, None
    # Autocast would take single products inside scorers and codecs to another dtype than what stands around them.
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        output = layer.attend(query.to(layer.model_dtype), attention_mask, factor, module).to(query.dtype)
    return ungraded(output, query).transpose(1, 2).contiguous(), None


def _check_direction(module: torch.nn.Module, mask: Tensor | LazyMask | None) -> None:
    """Raise where transformers' own forms of attention disagree about which tokens a prompt sees.

    Its sdpa gets no mask for a prompt that is merely causal and goes by `is_causal` of the module; its eager attention
    gets the mask. PaliGemma's modules have False (use_bidirectional_attention): its prefix is read in both directions.
    """
    if not isinstance(mask, LazyMask) or mask.first_column or mask.new_tokens == 1:
        return
    both = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
    if both and not getattr(module, "is_causal", True) and mask.causal_only:
        raise CacheMisuse(
            f"{type(module).__name__} reads in both directions what no mask forbids (is_causal=False), and this prompt "
            "comes without a mask of its own, so transformers' sdpa and eager attention differ on it: pass "
            "token_type_ids, as the model's processor gives them"
        )


def ungraded(output: Tensor, query: Tensor) -> Tensor:
    """Return an output whose gradient with respect to these queries is refused, where a gradient would be taken."""
    if query.requires_grad and torch.is_grad_enabled():
        refused: Tensor = _Ungraded.apply(output, query)
        return refused
    return output


class _Ungraded(torch.autograd.Function):
    """Lets a forward run with gradients on, and refuses the backward that would be wrong."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise CacheMisuse(
            "a compressed cache is for inference: there is no gradient through what it evicted or encoded"
        )


@run_eagerly
def forward_mask(*args: Any, config: Any = None, **kwargs: Any) -> LazyMask:
    """`lazy_mask` for a forward of a model with this configuration, whose attention stays ours until it ends."""
    # A forward begins. What one before it expected, and was broken off, must not be found by this one's attention.
    _EXPECTED.layer = None
    # transformers' sdpa goes without a mask for what is merely causal, and by the module's `is_causal`. A model with
    # another attention of its own gets the whole mask, and some of these modules say False (BigBird-Pegasus).
    if config is not None and name_before(config) not in ("sdpa", NAME):
        kwargs["allow_is_causal_skip"] = False
    mask = lazy_mask(*args, **kwargs)
    mask.config = config
    if config is not None and not torch.compiler.is_compiling():
        forward_began(config, mask)
    mask.began = next(CLOCK)
    return mask


def register() -> None:
    """Registers the name "kvtailor" with transformers. Nothing changes for models that do not use it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, forward_mask)
