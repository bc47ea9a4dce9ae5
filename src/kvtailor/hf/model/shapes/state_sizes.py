"""How large a layer's states are, by the arithmetic of each family; see `tests/seam/kinds` for what holds it to that.

Names are those of transformers' configurations. A family that is not here works as well: its states are counted once
they are there, and only a budget in bytes, which has to know them before, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["state_elements"]

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
