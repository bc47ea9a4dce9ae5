"""What kvtailor needs of a model, read from its configuration; and what it refuses, each in a sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvtailor.errors import UnsupportedModel

__all__ = ["Geometry", "check", "refusal"]

_SEES_ALL, _WINDOWED = "full_attention", "sliding_attention"
# Their attention changes keys or values between the cache and the attention function: the hand-over would be lost.
_CHANGES_STATES = frozenset({"diffllama", "jetmoe", "moonshine", "moonshine_streaming"})
_MASKS_BY_STATES = frozenset({"doge"})
# What transformers lets differ between layers and a geometry has once.
_PER_LAYER = frozenset(
    {
        "head_dim",
        "kv_lora_rank",
        "num_attention_heads",
        "num_key_value_heads",
        "qk_nope_head_dim",
        "sliding_window",
        "v_head_dim",
    }
)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shapes of a model's cache.

    Attributes:
        layers: attention layers of the decoder.
        compressed: the layers that see all tokens, which a plan compresses.
        windows: for each layer the model's own sliding window in tokens, None where it sees all.
        q_heads, kv_heads: query heads and kv heads of each layer.
        head_dim: size of a key and of a value.
        max_positions: the positions the model was made for; None if its configuration has no such number.
        model_type: transformers' name of the architecture.
        layer_types: transformers' name of each layer's kind of attention.
    """

    layers: int
    compressed: tuple[int, ...]
    windows: tuple[int | None, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    model_type: str
    layer_types: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """The geometry of a transformers configuration.

        Raises:
            UnsupportedModel: for what kvtailor does not support; the message has what and why.
        """
        sentence = refusal(config)
        if sentence is not None:
            raise UnsupportedModel(sentence)
        text = config.get_text_config(decoder=True)
        windows = tuple(text.sliding_window if kind == _WINDOWED else None for kind in _layer_types(text))
        heads = text.num_attention_heads
        return cls(
            layers=len(windows),
            compressed=tuple(i for i, window in enumerate(windows) if window is None),
            windows=windows,
            q_heads=heads,
            kv_heads=1 if getattr(text, "kv_lora_rank", None) else getattr(text, "num_key_value_heads", None) or heads,
            head_dim=(text.kv_lora_rank + text.qk_rope_head_dim) // 2
            if getattr(text, "kv_lora_rank", None)
            else getattr(text, "head_dim", None) or text.hidden_size // heads,
            max_positions=getattr(text, "max_position_embeddings", None),
            model_type=text.model_type,
            layer_types=tuple(_layer_types(text)),
        )

    def of_rank(self, ranks: int) -> Geometry:
        """Return the geometry of one process where so many share the heads of each layer evenly."""
        return replace(self, q_heads=self.q_heads // ranks, kv_heads=self.kv_heads // ranks)

    def window_elements(self) -> int:
        """Elements of one row that the model's own windows hold once they are full."""
        return sum(2 * (window - 1) * self.kv_heads * self.head_dim for window in self.windows if window is not None)

    def full_bytes(self, rows: int, seen: int, element_size: int) -> int:
        """Bytes of keys and values of `seen` tokens of `rows` rows without compression."""
        slots = sum(seen if window is None else min(seen, window - 1) for window in self.windows)
        return 2 * rows * slots * self.kv_heads * self.head_dim * element_size


def refusal(config: Any) -> str | None:
    """Why a model of this configuration is refused, as a sentence; None where it is supported."""
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder model; kvtailor compresses the cache of decoder-only models"
    text = config.get_text_config(decoder=True)
    if text.model_type.startswith(("gemma4", "diffusion_gemma")):
        return (
            f"{name} is of the Gemma 4 family, whose layers may differ in heads and head sizes, share keys, or read "
            "those of another model; kvtailor does not support that yet"
        )
    differing = sorted(_PER_LAYER & set(getattr(text, "per_layer_attributes", None) or ()))
    heads = getattr(text, "num_attention_heads_per_layer", None) or []
    if differing or any(each != text.num_attention_heads for each in heads):
        what = ", ".join(differing) or "num_attention_heads_per_layer"
        return f"{name} has layers that differ in their shapes ({what}); kvtailor does not support that yet"
    if getattr(text, "num_attention_heads", None) is None or getattr(text, "num_hidden_layers", None) is None:
        return (
            f"{name} does not say in its configuration how many layers and attention heads its decoder has: it is "
            "recurrent, or made of several transformers, and kvtailor supports neither"
        )
    unknown = sorted(set(_layer_types(text)) - {_SEES_ALL, _WINDOWED})
    if unknown:
        kinds = ", ".join(unknown)
        return f"{name} has layers of kind {kinds}; kvtailor supports full and sliding-window attention layers"
    if getattr(text, "num_kv_shared_layers", 0):
        return f"{name} shares keys and values between layers; kvtailor does not support that yet"
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} caps its attention logits (softcapping); kvtailor does not support that yet"
    if name in _CHANGES_STATES or text.model_type in _CHANGES_STATES:
        return f"{name} changes keys or values between cache and attention; kvtailor does not support that"
    if text.model_type in _MASKS_BY_STATES:
        return (
            f"{name} makes an attention mask of its own from the values of all tokens at each step, so none of them "
            "may be evicted; kvtailor does not support that"
        )
    if getattr(text, "cross_attention_layers", None):
        return (
            f"{name} has cross-attention layers ({', '.join(map(str, text.cross_attention_layers))}) in its decoder; "
            "kvtailor supports self-attention only"
        )
    if getattr(text, "is_causal", True) is False:
        return f"{name} is configured for bidirectional attention; a KV cache needs causal attention"
    if getattr(text, "add_cross_attention", False):
        return f"{name} is configured with cross-attention layers; kvtailor supports self-attention only"
    return None


def check(model: Any, own_name: str) -> None:
    """Raises `UnsupportedModel` for a model that cannot use kvtailor's cache as it was loaded.

    Args:
        model: a transformers causal language model.
        own_name: the name under which kvtailor's attention is registered.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedModel(f"expected a transformers causal language model, and got a {type(model).__name__}")
    name = config.model_type
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name} keeps a state of its own instead of some or all keys and values (recurrent, convolutional or "
            "compressed); kvtailor does not support that yet"
        )
    sentence = refusal(config)
    if sentence is not None:
        raise UnsupportedModel(sentence)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{type(model).__name__} does not declare that all of its attention comes from transformers' "
            "AttentionInterface (_supports_attention_backend), which kvtailor needs"
        )
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"this {name} is wrapped by a PEFT adapter that puts learned tokens or keys before each prompt "
            f"({type(adapter).__name__}), which kvtailor's cache would not count; kvtailor supports adapters of weights"
        )
    text = config.get_text_config(decoder=True)
    # Some prefixes are read in both directions by a decoder; an encoder declares it itself.
    if getattr(text, "is_decoder", None) is False:
        for module in model.modules():
            own = getattr(module, "config", None) is text and isinstance(getattr(module, "layer_idx", None), int)
            if own and getattr(module, "is_causal", True) is False:
                raise UnsupportedModel(
                    f"{name} is configured as an encoder (is_decoder=False), so its attention is not causal, and a KV "
                    "cache needs causal attention; set is_decoder=True in its configuration if it is a decoder"
                )
    asked = text._attn_implementation
    if asked not in (None, "sdpa", "eager", own_name):
        raise UnsupportedModel(
            f"this model was loaded with attn_implementation={asked!r}, and kvtailor's cache comes with an attention "
            "of its own; load the model without attn_implementation, or call model.set_attn_implementation('sdpa') "
            "first"
        )


def _layer_types(text: Any) -> list[str]:
    types = getattr(text, "layer_types", None)
    if types is not None:
        return list(types)
    windowed = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    chunked = getattr(text, "attention_chunk_size", None) is not None
    kind = _WINDOWED if windowed else "chunked_attention" if chunked else _SEES_ALL
    return [kind] * text.num_hidden_layers
