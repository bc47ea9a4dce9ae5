"""Tiny random models of the families that cache latents, and a reference that knows nothing of kvtailor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache

import torch
import transformers
from tests.support.seam.zoo import VOCABULARY
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import sdpa_mask

from kvtailor.hf.versions import hand_cache

__all__ = [
    "LATENT_FAMILIES",
    "MIXED_FAMILIES",
    "LatentReference",
    "build_latent",
    "latent_configs",
    "mixed_configs",
    "own_bytes",
]

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Unequal on purpose: no two sizes of a head, of a latent and of their sums are the same.
_LATENT = {"kv_lora_rank": 36, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_LOW_QUERIES = {"q_lora_rank": 24}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Of weights, where those of the others leave a model's attention too flat.
_SHARPNESS = {"bailing_hybrid": 0.45}
_DENSE_FIRST = {"first_k_dense_replace": 1}


@cache
def latent_configs() -> dict[str, transformers.PreTrainedConfig]:
    """One configuration for each family whose layers are all of latent attention."""
    plain, queries = {**_SHAPE, **_LATENT}, {**_SHAPE, **_LATENT, **_LOW_QUERIES}
    return {
        "deepseek_v2": transformers.DeepseekV2Config(**plain, **_EXPERTS, **_DENSE_FIRST, q_lora_rank=None, head_dim=8),
        "deepseek_v3": transformers.DeepseekV3Config(**queries, **_EXPERTS, **_DENSE_FIRST),
        "glm4_moe_lite": transformers.Glm4MoeLiteConfig(**queries, **_EXPERTS),
        "minicpm3": transformers.MiniCPM3Config(**queries, scale_emb=1, scale_depth=3.0),
        "longcat_flash": transformers.LongcatFlashConfig(
            **queries,
            head_dim=8,
            num_layers=2,
            ffn_hidden_size=96,
            expert_ffn_hidden_size=32,
            n_routed_experts=4,
            moe_topk=2,
            zero_expert_num=2,
        ),
        "youtu": transformers.YoutuConfig(**queries),
        "axk1": transformers.AXK1Config(**queries, **_EXPERTS, **_DENSE_FIRST),
    }


LATENT_FAMILIES = tuple(latent_configs())


@cache
def mixed_configs() -> dict[str, transformers.PreTrainedConfig]:
    """Families whose other layers are linear or have a window of their own: those that this transformers has."""
    shape = {**_SHAPE, **_LATENT, **_EXPERTS, "num_hidden_layers": 4}
    in_turns = {"layer_types": ["linear_attention", "full_attention"] * 2}
    windowed = {**_LATENT, **_LOW_QUERIES, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24}
    options = {
        "kimi_linear": {**in_turns, "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 16},
        "bailing_hybrid": {**in_turns, "q_lora_rank": None, "head_dim": 16, "num_experts": 4},
        "dots3_note_text": {
            **_LOW_QUERIES,
            **_DENSE_FIRST,
            "use_dsa": False,
            "sliding_window": 16,
            **{f"swa_{name}": value for name, value in {**windowed, "kv_lora_rank": 28}.items()},
        },
    }
    known = transformers.CONFIG_MAPPING
    return {name: known[name](**{**shape, **own}) for name, own in options.items() if name in known}


MIXED_FAMILIES = tuple(mixed_configs())


def build_latent(
    family: str, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32, state: int = 0
) -> transformers.PreTrainedModel:
    """A random model whose attention is sharp enough that which tokens it sees matters; a copy of its own."""
    torch.manual_seed(state)
    return copy.deepcopy(_made(family, attention, dtype, state))


@cache
def _made(family: str, attention: str, dtype: torch.dtype, state: int) -> transformers.PreTrainedModel:
    torch.manual_seed(state)
    config = copy.deepcopy((latent_configs() | mixed_configs())[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if "embed" in name else _SHARPNESS.get(family, 0.25)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def own_bytes(cache: DynamicCache) -> int:
    """What transformers' own cache holds: latents and rotated keys, and states of other layers."""
    waiting, total = [vars(layer) for layer in cache.layers], 0
    while waiting:
        thing = waiting.pop()
        # A number that transformers keeps as a tensor is none of what is cached.
        if isinstance(thing, Tensor) and thing.ndim:
            total += thing.numel() * thing.element_size()
        elif isinstance(thing, dict | list | tuple):
            waiting += thing.values() if isinstance(thing, dict) else thing
    return total


class LatentReference:
    """The same model on a full cache of latents, each layer denied the columns that it may not see.

    The model expands the latents of its own cache, and a plain float64 softmax goes over all heads: nothing of
    kvtailor's attention, masks or caches is used, and nothing is absorbed.

    Attributes:
        cache: transformers' own, whose latents a test may replace by decoded ones.
    """

    NAME = "latent-reference"

    def __init__(self, family: str, dtype: torch.dtype = torch.float32, state: int = 0):
        AttentionInterface.register(self.NAME, self._attention)
        AttentionMaskInterface.register(self.NAME, self._mask)
        self.model = build_latent(family, attention=self.NAME, dtype=dtype, state=state)
        self.cache = DynamicCache(config=self.model.config)
        self.held: Mapping[int, Tensor] = {}

    @staticmethod
    def _mask(*args, allow_is_causal_skip: bool = True, **kwargs):
        return sdpa_mask(*args, allow_is_causal_skip=False, **kwargs)

    def _attention(self, module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        assert key.shape[1] == query.shape[1], "every head of the model has keys of its own"
        allowed = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2]).clone()
        held = self.held.get(module.layer_idx)
        if held is not None:
            # (b, 1, n): one kept set for all heads.
            allowed[..., : held.shape[-1]] &= held[:, :, None]
        logits = (query.double() @ key.double().transpose(-1, -2)) * scaling
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        return (logits.softmax(-1) @ value.double()).to(query.dtype).transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor, held: Mapping[int, Tensor]) -> Tensor:
        """Logits (b, t, v) of new tokens, each layer seeing only `held` of the earlier ones."""
        self.held = held
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(ids, attention_mask=mask, **hand_cache(self.cache), position_ids=positions).logits
