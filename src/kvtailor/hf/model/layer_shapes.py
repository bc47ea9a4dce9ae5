"""What each layer of a model keeps of the tokens that it has seen, read from the model's configuration.

Which layers keep keys and values of all tokens, of a window, a state of constant size, or nothing is asked of
transformers' own cache for the same configuration. Heads and sizes are the configuration's; a cache compares them with
the first keys that come.

How large a layer's states are is the arithmetic of each family (`tests/seam/kinds` holds it to that). Names are those
of transformers' configurations. A family that is not here works as well: its states are counted once they are there,
and only a budget in bytes, which has to know them before, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

__all__ = ["LayerShape", "has_indexer", "layer_config", "layer_shapes", "state_elements", "unknown_kinds"]

# transformers' classes whose bookkeeping is known; a class derived from one of them may keep something else as well.
_KNOWN = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    }
)
_CONVOLUTIONS_ALONE = frozenset({"inkling_text", "inkling2_text"})
# Their code gives windowed layers twice the kv heads that their configuration has.
_TWICE_IN_WINDOWS = frozenset({"mimo_v2_flash"})
_WITHOUT_CACHE = frozenset({"moe", "mlp"})


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What one layer keeps.

    Attributes:
        kind: transformers' name of the layer's type.
        window: tokens of the model's own sliding window or chunk; None where no keys leave by themselves.
        q_heads: query heads; 0 where the layer has no attention.
        kv_heads: kv heads whose keys and values the layer keeps; 0 where it keeps none.
        key_size, value_size: of one head, in elements.
        query_size: of one query head as the model makes it, in elements.
        states: linear-attention or convolution states of constant size that it keeps; 0 on most layers.
        convolution: these states are the newest inputs of convolutions, which can be taken back, and none is recurrent.
        state_elements: elements of all of these for one row, those in the cache's dtype and those in float32; None
            where they are not known from the configuration.
        reads: the layer whose keys and values this one attends to, where it has none of its own.
        latents: it keeps latents in the place of keys and rotated keys in that of values, of one kv head, from which
            its module makes the keys and values of all query heads.
    """

    kind: str
    window: int | None = None
    q_heads: int = 0
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    query_size: int = 0
    states: int = 0
    convolution: bool = False
    state_elements: tuple[int, int] | None = None
    reads: int | None = None
    latents: bool = False

    @property
    def compressed(self) -> bool:
        """Whether it keeps keys and values of all tokens, which a plan compresses."""
        return self.kv_heads > 0 and self.window is None

    @property
    def token_elements(self) -> int:
        """Elements of the key and the value of one token, over all kv heads."""
        return self.kv_heads * (self.key_size + self.value_size)

    def states_bytes(self, element_size: int) -> int | None:
        """Return the bytes of its states for one row; None where they are not known."""
        if self.state_elements is None:
            return None
        own, single = self.state_elements
        return own * element_size + 4 * single

    def slots(self, seen: int) -> int:
        """Return the tokens of which keys are kept after `seen` tokens, without compression."""
        if not self.kv_heads:
            return 0
        return seen if self.window is None else min(seen, self.window - 1)


def has_indexer(text: Any) -> bool:
    """Return whether layers of a decoder cache keys of an indexer, which chooses the tokens that a query sees."""
    try:
        return any(isinstance(layer, DynamicIndexedLayer) for layer in _own_layers(text))
    except KeyError:
        # A type of layer that transformers' own general cache does not know; see `unknown_kinds`.
        return False


def unknown_kinds(text: Any) -> list[str]:
    """Return the layer types of a decoder's configuration that no cache of ours has, by name."""
    types = getattr(text, "layer_types", None) or []
    try:
        layers = _own_layers(text)
    except KeyError as error:
        # transformers names the type that its own general cache does not know.
        return [str(error.args[0])]
    found = [
        types[index] if index < len(types) else type(layer).__name__
        for index, layer in enumerate(layers)
        if type(layer).__name__ not in _KNOWN
    ]
    return sorted(set(found))


def layer_shapes(text: Any) -> tuple[LayerShape, ...]:
    """Return what each layer of a decoder keeps, in the order of the cache's layers.

    Args:
        text: the decoder's configuration.
    """
    layers = _own_layers(text)
    count = max(len(layers), text.num_hidden_layers)
    types = list(getattr(text, "layer_types", None) or [])
    sources = _sources(text, types)
    shapes = []
    for index in range(count):
        layer = layers[index] if index < len(layers) else None
        kind = types[index] if index < len(types) else _kind_of(layer)
        shapes.append(_shape(layer_config(text, index), layer, kind, index, sources.get(index)))
    return tuple(shapes)


def layer_config(text: Any, index: int) -> Any:
    """Return the configuration of one layer, which is the decoder's own where its layers are alike."""
    if not getattr(text, "per_layer_attributes", None):
        return text
    return text.per_layer_config[index]


def _own_layers(text: Any) -> list[Any]:
    """The layers of the cache that transformers makes for this configuration."""
    layers: list[Any] = DynamicCache(config=text).layers
    return layers


def _kind_of(layer: Any) -> str:
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "sliding_attention"
    return "full_attention" if isinstance(layer, DynamicLayer) else type(layer).__name__


def _shape(config: Any, layer: Any, kind: str, index: int, reads: int | None) -> LayerShape:
    q_heads, kv_heads, key_size, value_size = _heads(config, kind, index)
    if reads is not None:
        return LayerShape(kind=kind, q_heads=q_heads, reads=reads)
    states = layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0
    # A legacy type of a layer without a mixer ("moe", "mlp") has a cache layer in older releases, which stays empty.
    elements = state_elements(config) if states else None
    convolution = bool(states) and (kind == "conv" or config.model_type in _CONVOLUTIONS_ALONE)
    if not isinstance(layer, DynamicLayer) or kind in _WITHOUT_CACHE:
        return LayerShape(kind=kind, states=states, convolution=convolution, state_elements=elements)
    return LayerShape(
        kind=kind,
        window=layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None,
        q_heads=q_heads,
        kv_heads=kv_heads,
        key_size=key_size,
        value_size=value_size,
        # Queries of latent layers are those of the heads that the latents expand to.
        query_size=config.qk_nope_head_dim + config.qk_rope_head_dim if _has_latents(config) else key_size,
        states=states,
        latents=_has_latents(config),
        convolution=convolution,
        state_elements=elements,
    )


def _heads(config: Any, kind: str, index: int) -> tuple[int, int, int, int]:
    """Query heads, kv heads, and the sizes of a key and of a value."""
    # Some families name the heads of their windowed layers apart.
    own = "swa_" if kind in ("sliding_attention", "hybrid_sliding") else ""

    def named(name: str) -> Any:
        return getattr(config, own + name, None) or getattr(config, name, None)

    each = getattr(config, "num_attention_heads_per_layer", None)
    q_heads = each[index] if each else named("num_attention_heads")
    if config.model_type == "falcon":
        # One head for all queries, or keys that are repeated before the cache gets them.
        shared = config.multi_query and not config.new_decoder_architecture
        return q_heads, 1 if shared else q_heads, config.head_dim, config.head_dim
    if _has_latents(config):
        return q_heads, 1, config.kv_lora_rank, config.qk_rope_head_dim
    size = named("head_dim") or config.hidden_size // config.num_attention_heads
    kv_heads = named("num_key_value_heads") or q_heads
    if kind == "sliding_attention" and config.model_type in _TWICE_IN_WINDOWS:
        kv_heads *= 2
    return q_heads, kv_heads, size, named("v_head_dim") or size


def _has_latents(config: Any) -> bool:
    """Whether the attention of a layer is multi-head latent attention."""
    return bool(getattr(config, "kv_lora_rank", None))


def _sources(text: Any, types: Sequence[str]) -> dict[int, int]:
    """Of each layer that reads another one's keys, that other one: the last of its type that has its own."""
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if not shared:
        return {}
    first = text.num_hidden_layers - shared
    last = {kind: index for index, kind in enumerate(types[:first])}
    return {index: last[types[index]] for index in range(first, text.num_hidden_layers)}


Elements = tuple[int, int]
"""Elements in the model's dtype, and in float32."""


def state_elements(config: Any) -> Elements | None:
    """Return the elements of the states that a layer with states keeps for one row; None where they are not known.

    Args:
        config: of the layer.
    """
    known = _FAMILIES.get(config.model_type)
    return None if known is None else known(config)


def _delta_net(config: Any) -> Elements:
    """Gated delta net: inputs of its convolution over queries, keys and values, and a matrix for each value head."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return (2 * keys + values) * config.linear_conv_kernel_dim, values * config.linear_key_head_dim


def _delta_attention(config: Any) -> Elements:
    """Delta attention with as many heads for keys as for values."""
    channels = config.linear_num_heads * config.linear_head_dim
    return 3 * channels * config.linear_conv_kernel_dim, channels * config.linear_head_dim


def _mamba(config: Any) -> Elements:
    """Mamba: the inputs of its convolution, and a state for each channel."""
    channels = config.mamba_expand * config.hidden_size
    return channels * config.mamba_d_conv, channels * config.mamba_d_state


def _mamba2(config: Any) -> Elements:
    """Mamba-2: its convolution runs over inputs and projections of the state, and a head has a matrix."""
    channels = config.mamba_n_heads * config.mamba_d_head
    wide = channels + 2 * config.mamba_n_groups * config.mamba_d_state
    return wide * config.mamba_d_conv, channels * config.mamba_d_state


def _nemotron(config: Any) -> Elements:
    """Mamba-2 in Nemotron-H's names."""
    channels = config.mamba_num_heads * config.mamba_head_dim
    wide = channels + 2 * config.n_groups * config.ssm_state_size
    return wide * config.conv_kernel, channels * config.ssm_state_size


def _zamba2(config: Any) -> Elements:
    """Mamba-2 in Zamba2's names."""
    channels = config.n_mamba_heads * config.mamba_headdim
    wide = channels + 2 * config.mamba_ngroups * config.mamba_d_state
    return wide * config.mamba_d_conv, channels * config.mamba_d_state


def _short_convolution(config: Any) -> Elements:
    """The inputs of a short convolution over the hidden state."""
    return config.hidden_size * config.conv_L_cache, 0


def _lightning(config: Any) -> Elements:
    """A matrix for each head."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * size**2, 0


_FAMILIES: dict[str, Callable[[Any], Elements]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
        _delta_net,
    ),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _delta_attention),
    **dict.fromkeys(("jamba", "zamba"), _mamba),
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1"), _mamba2),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_convolution),
    "nemotron_h": _nemotron,
    "zamba2": _zamba2,
    "minimax": _lightning,
}
