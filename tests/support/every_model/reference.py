"""The same model on its own full cache, in which each layer and kv head is denied the columns that an eviction dropped.

The attention is the eager one of the model's own modelling file, so learned sinks, caps of logits and scaling are
transformers' own; the mask is transformers' too. Nothing of kvtailor's attention, masks or caches is used.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch
from tests.support.seam.zoo import held_columns
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from kvtailor.hf.versions import hand_cache

__all__ = ["decoded_under_mask"]

NAME = "masked-by-eviction"


@torch.no_grad()
def decoded_under_mask(model: Any, cache: Any, ids: Tensor, tokens: Tensor, **options: Any) -> Tensor | None:
    """Return the logits (1, t, v) of a model that decodes `tokens` behind `ids`, seeing what the cache holds of them.

    Args:
        model: as it was loaded.
        cache: of ours, after the generation; its plan evicts after the prompt and not while decoding.
        ids: (1, n) the prompt.
        tokens: (1, n + t) the prompt and what was generated.
        options: further arguments of `generate`.

    Returns:
        None where the model's own eager attention cannot be found.
    """
    prompt = ids.shape[1]
    held = {layer: columns[:, :, :prompt] for layer, columns in held_columns(cache).items()}
    shapes = cache.geometry.shapes
    # A layer that reads another one's keys sees what that one holds.
    held |= {index: held[shape.reads] for index, shape in enumerate(shapes) if shape.reads in held}
    keeping = [index for index, shape in enumerate(shapes) if shape.kv_heads]
    masked = _Masked(held, keeping if _runs_several_times(model) else None)
    given: dict[str, Any] = dict(options)
    if cache.geometry.multiplies:
        given |= hand_cache(_DenyingCache(held, config=model.config.get_text_config(decoder=True)))
    AttentionInterface.register(NAME, masked.attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    own = copy.deepcopy(model)
    text = own.config.get_text_config(decoder=True)
    if cache.geometry.multiplies:
        # The lease of our cache has our name in the configuration; what the model itself would have is eager.
        text._attn_implementation = {"": "eager"}
    else:
        own.set_attn_implementation(NAME)
        if text._attn_implementation != NAME:
            return None
    found = own.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens.shape[1] - prompt,
        do_sample=False,
        min_new_tokens=tokens.shape[1] - prompt,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        use_cache=True,
        **given,
    )
    if not masked.found_eager:
        return None
    logits = torch.stack(found.logits, 1).float()
    # Where tokens part, what comes later has another text; the logits up to there tell whether that is right.
    same = (found.sequences == tokens)[0, prompt:].long().cumprod(0)
    return logits[:, : min(int(same.sum()) + 1, logits.shape[1])]


def _runs_several_times(model: Any) -> bool:
    """Whether modules of a model are called several times in a forward, each time for another layer of the cache."""
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    return any({"cycle_offset", "layer_idx"} & set(inspect.signature(each.forward).parameters) for each in attentions)


class _Masked:
    """Attention on a full cache.

    Args:
        held: by layer (b, h, n) bool.
        in_turn: the layers of the cache in the order in which a forward comes to them, where modules run several times;
            None where a module's `layer_idx` is its layer of the cache.
    """

    def __init__(self, held: dict[int, Tensor], in_turn: list[int] | None):
        self.held, self.found_eager, self.in_turn, self.calls = held, True, in_turn, 0

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Any:
        mask = attention_mask
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            self.found_eager = False
            eager = _plain
        if self.in_turn is None:
            layer = getattr(module, "layer_idx", None)
        else:
            layer = self.in_turn[self.calls % len(self.in_turn)]
        self.calls += 1
        held = self.held.get(layer)
        # A forward of the prompt may read its last token alone in some layers; nothing is dropped then.
        if held is not None and key.shape[2] > held.shape[-1]:
            # (b, h, n) of kv heads, or of one latent, to (b, q, 1, n + decoded)
            denied = ~held.repeat_interleave(query.shape[1] // held.shape[1], 1)[:, :, None]
            mask = torch.zeros((1, 1, 1, key.shape[2])) if mask is None else mask
            mask = mask.expand(-1, query.shape[1], -1, key.shape[2]).clone()
            mask[..., : denied.shape[-1]].masked_fill_(denied, torch.finfo(mask.dtype).min)
        return eager(module, query, key, value, mask, **options)


class _DenyingCache(DynamicCache):
    """A full cache for a model that multiplies its keys itself: logits of dropped columns come out as a low number.

    Args:
        held: by layer (b, h, n) bool.
    """

    def __init__(self, held: dict[int, Tensor], **options: Any):
        super().__init__(**options)
        self.held = held

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        held = self.held.get(layer_idx)
        if held is not None and keys.shape[2] > held.shape[-1]:
            keys = keys.as_subclass(_DeniedKeys)
            keys.denied = ~held
        return keys, values


class _DeniedKeys(Tensor):
    """Keys of which some must not be seen; real numbers, and a real product of them."""

    denied: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        keys = next((each for each in args if isinstance(each, _DeniedKeys)), None)
        if keys is None or not isinstance(found, Tensor):
            return found
        if func.__name__ not in ("matmul", "__matmul__", "bmm", "baddbmm"):
            found.denied = keys.denied
            return found
        # Logits (b, q, t, n), or (b * q, t, n)
        logits = found.as_subclass(Tensor)
        b, h, n = keys.denied.shape
        each = logits.view(b, -1, *logits.shape[-2:]).clone()
        denied = keys.denied.repeat_interleave(each.shape[1] // h, 1)[:, :, None]
        each[..., :n].masked_fill_(denied, -1e30)
        return each.view(logits.shape)


def _plain(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    scaling = options.get("scaling")
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
    logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        logits = logits + mask
    output = logits.softmax(-1) @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return output.transpose(1, 2).contiguous(), None
