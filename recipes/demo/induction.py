"""Recipe: fresh weights that can already copy a little.

Copying needs two attention layers to agree: one that brings the previous token's identity along, one that looks for the
current token among those. Gradient descent finds the pair only after a long plateau, which on one core costs most of an
hour. Here one such pair is written into the fresh weights (one head of layer 0, one of layer 1); training starts from a
model that copies and changes all of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["EMBEDDING_SCALE", "MATCH_SHARPNESS", "PREVIOUS_SHARPNESS", "start_with_copying"]

PREVIOUS_SHARPNESS = 10.0  # of the attention logit to the previous token, per rotary pair
MATCH_SHARPNESS = 25.0  # attention logit of a token that followed an equal one
EMBEDDING_SCALE = 8.0  # against the usual fresh embeddings: the larger, the less the first steps disturb the pair


def start_with_copying(model: Any, first_length: int = 300) -> None:
    """Write a previous-token head and an induction head into the fresh Llama ``model``, in place.

    Args:
        model: a new `LlamaForCausalLM` with at least two layers and tied embeddings.
        first_length: tokens over which the match shall survive the rotation of positions.
    """
    config = model.config
    hidden, size = config.hidden_size, config.head_dim
    half = size // 2
    turns = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    basis = torch.linalg.qr(torch.randn(hidden, hidden))[0].T
    common, carried, copied = basis[0], basis[1 : 1 + size], basis[1 + size : 1 + 2 * size]
    previous = basis[1 + 2 * size : 1 + 3 * size]
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding *= EMBEDDING_SCALE
        model.model.norm.weight /= EMBEDDING_SCALE
        length = embedding.norm(dim=1).mean()
        free = torch.cat([common[None], previous])
        embedding -= embedding @ free.T @ free
        embedding *= length / embedding.norm(dim=1, keepdim=True).clamp_min(1e-6)
        embedding += 0.5 * length * common
        token_share, common_share = (math.sqrt(hidden) * part for part in (1 / math.sqrt(1.25), 0.5 / math.sqrt(1.25)))

        first = model.model.layers[0].self_attn
        key = torch.zeros(size)
        fast = turns > 0.02
        key[:half] = fast * math.sqrt(PREVIOUS_SHARPNESS * math.sqrt(size))
        query = torch.zeros(size)
        query[:half], query[half:] = key[:half] * turns.cos(), -key[:half] * turns.sin()
        first.k_proj.weight[:size] = key[:, None] * common / common_share
        first.q_proj.weight[:size] = query[:, None] * common / common_share
        first.v_proj.weight[:size] = carried * length / (token_share * math.sqrt(size / hidden))
        first.o_proj.weight[:, :size] = previous.T

        second = model.model.layers[1].self_attn
        slow = turns * first_length < 1.0
        kept = torch.cat([slow, slow]).float()[:, None]
        norm = math.sqrt(hidden) / math.sqrt(1 + 0.25 + 1)
        overlap = norm**2 * math.sqrt(size / hidden) * kept.mean().item()
        gain = math.sqrt(MATCH_SHARPNESS * math.sqrt(size) / overlap)
        second.q_proj.weight[:size] = carried * kept * gain
        second.k_proj.weight[:size] = previous * kept * gain
        second.v_proj.weight[:size] = copied * length / (norm * math.sqrt(size / hidden))
        second.o_proj.weight[:, :size] = copied.T * 4
