"""Tiny random models of every family, offline, and a reference that knows nothing of kvtailor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch
import transformers
from tests.support.seam.layer_kinds import hybrid_configs, mixed_configs
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import sdpa_mask

from kvtailor.hf.versions import hand_cache

T = TypeVar("T")
# Their embeddings are their logits' weights too: beside large ones, what these attend to would hardly show.
QUIET = {"gemma4": 0.25, "gemma4_shared": 0.25, "zamba": 0.1}
VOCABULARY = 131
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2}


@cache
def configs() -> dict[str, transformers.PreTrainedConfig]:
    """One configuration for each family that the README names."""
    hybrid = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return {
        "gpt_neox": transformers.GPTNeoXConfig(**_SHAPE, rotary_pct=0.25),
        "llama": transformers.LlamaConfig(**_SHAPE, **_GROUPED),
        "mistral": transformers.MistralConfig(**_SHAPE, **_GROUPED, sliding_window=None),
        "mistral_window": transformers.MistralConfig(**_SHAPE, **_GROUPED, sliding_window=24),
        "qwen2": transformers.Qwen2Config(**_SHAPE, **_GROUPED),
        "qwen3": transformers.Qwen3Config(**_SHAPE, **_GROUPED, head_dim=16),
        "phi3": transformers.Phi3Config(**_SHAPE, **_GROUPED),
        "gemma3": transformers.Gemma3TextConfig(
            **{**_SHAPE, "num_hidden_layers": 4}, **_GROUPED, head_dim=16, sliding_window=16, layer_types=hybrid
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        ),
        "opt": transformers.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            word_embed_proj_dim=64,
        ),
    }


@cache
def softmax_configs() -> dict[str, transformers.PreTrainedConfig]:
    """Families whose softmax has more than a factor: learned sinks, or a cap on logits. Windows and full layers."""
    hybrid = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    shape = {**_SHAPE, **_GROUPED, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16, "layer_types": hybrid}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    # All experts at once: rounding would otherwise choose others here and there.
    experts = {"num_local_experts": 3, "num_experts_per_tok": 3}
    made = {
        "gpt_oss": ("GptOssConfig", {**rope, **experts}),
        # Its windows alone have sinks, and twice the kv heads.
        "mimo_v2_flash": ("MiMoV2FlashConfig", {**experts, "v_head_dim": 12, "moe_intermediate_size": 32}),
        "granite_swa": ("GraniteSWAConfig", {"attention_multiplier": 0.25}),
        "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    }
    # Not every version of transformers that is supported has all of them.
    return {
        name: getattr(transformers, kind)(**shape, **own)
        for name, (kind, own) in made.items()
        if hasattr(transformers, kind)
    }


# How far two right ways of these models may lie apart in float32, relative to the largest number. Sums meet in another
# order on another processor, with another number of threads and in another batch. The ways that are torch's own lie up
# to 6e-6 apart here (a batch and its rows, sdpa and eager), which tests/seam/test_rounding.py measures anew on each
# machine; what is decoded after a prompt, and over turns, adds to it. What is wrong here is wrong by 1e-3 and more.
ROUNDING = 1e-4

SOFTMAX_FAMILIES = tuple(softmax_configs())
FAMILIES = tuple(configs())
COMPRESSIBLE = tuple(name for name in FAMILIES if name != "mistral_window")


def build(
    family: str,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    state: int = 0,
    layers: int | None = None,
):
    """A random model whose attention is sharp enough that which tokens it sees matters; `layers`: of llama only.

    A copy of its own: a cache sets its attention, and tests hook and change it.
    """
    torch.manual_seed(state)
    return copy.deepcopy(_made(family, attention, dtype, state, layers))


@cache
def _made(family: str, attention: str, dtype: torch.dtype, state: int, layers: int | None):
    torch.manual_seed(state)
    config = copy.deepcopy({**configs(), **softmax_configs(), **hybrid_configs(), **mixed_configs()}[family])
    if family in SOFTMAX_FAMILIES and attention == "sdpa":
        # transformers' sdpa knows neither sinks nor a cap, and these families refuse it.
        attention = "eager"
    if layers is not None:
        config.num_hidden_layers = layers
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = 1.0 if "embed" in name or "wte" in name else 0.25
                if family in QUIET and "embed" in name:
                    scale = QUIET[family]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif name.endswith("sinks"):
                # As large as logits are, and otherwise for each head.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 + 2)
            elif parameter.dim() == 3 and family in SOFTMAX_FAMILIES:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(lengths: tuple[int, ...], state: int = 1) -> tuple[Tensor, Tensor]:
    """Left-padded random prompts (b, n) of these lengths and their attention mask."""
    generator = torch.Generator().manual_seed(state)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return ids, mask


def held_columns(cache) -> dict[int, Tensor]:
    """For each compressed layer of the model (b, h, seen) bool: this head holds this column."""
    found = {}
    for layer, state in zip(cache.geometry.compressed, cache.engine.states, strict=True):
        mask = torch.zeros(state.rows * state.heads, state.stored.seen, dtype=torch.bool)
        for part in state.parts():
            columns = part.layout.columns(torch.device("cpu")).expand(part.layout.lanes, -1)
            filled = part.layout.filled(torch.device("cpu"))
            filled = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
            owner = part.layout.owners(torch.device("cpu"))[:, None].expand_as(columns)
            assert not mask[owner[filled], columns[filled]].any(), "a column is held twice"
            mask[owner[filled], columns[filled]] = True
        found[layer] = mask.view(state.rows, state.heads, -1)
    return with_readers(cache, found)


def with_readers(cache, of_layers: dict[int, T]) -> dict[int, T]:
    """The same for the layers of the model that read what a compressed layer holds."""
    readers = cache.geometry.readers.items()
    return of_layers | {layer: of_layers[source] for source, layers in readers for layer in layers}


def minimax_cache() -> DynamicCache:
    """MiniMax's own cache, which counts what it has seen by its first layer, although that one keeps no keys."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class ByItsFirstKeys(MiniMaxCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            return super().get_seq_length(1)

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return super().get_mask_sizes(query_length, 1)

    return ByItsFirstKeys()


class MaskedReference:
    """The same model on a full cache, in which each layer and kv head is denied the columns that it may not see.

    A plain softmax over repeated heads: nothing of kvtailor's attention, masks or caches is used.

    Attributes:
        ignores: arguments that the model hands over and that are left out ("softcap", "s_aux"): a wrong reference.
        given: of each layer (b, q, t, n) the probabilities of the newest call, a sink's left out.
    """

    NAME = "masked-reference"

    def __init__(self, family: str, dtype: torch.dtype = torch.float32, state: int = 0):
        AttentionInterface.register(self.NAME, self._attention)
        AttentionMaskInterface.register(self.NAME, self._mask)
        self.model = build(family, attention=self.NAME, dtype=dtype, state=state)
        self.cache = minimax_cache() if family == "minimax" else DynamicCache(config=self.model.config)
        self.layer = -1
        self.held: Mapping[int, Tensor] = {}
        self.ignores: tuple[str, ...] = ()
        self.given: dict[int, Tensor] = {}

    @staticmethod
    def _mask(*args, allow_is_causal_skip: bool = True, **kwargs):
        return sdpa_mask(*args, allow_is_causal_skip=False, **kwargs)

    def _attention(self, module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        self.layer = self.layer_of(module, key)
        return self._attended(module, query, key, value, mask, scaling, **kwargs)

    def _attended(self, module, query, key, value, mask, scaling=None, **kwargs):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        allowed = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2]).clone()
        held = self.held.get(self.layer)
        if held is not None:
            allowed[..., : held.shape[-1]] &= held.repeat_interleave(group, 1)[:, :, None]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        logits = (query.double() @ key.double().transpose(-1, -2)) * scaling
        softcap, sinks = (None if name in self.ignores else kwargs.get(name) for name in ("softcap", "s_aux"))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        if sinks is not None:
            # One more key that is always seen, whose logit is the sink and whose value is 0.
            logits = torch.cat([logits, sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
            value = torch.nn.functional.pad(value, (0, 0, 0, 1))
        given = logits.softmax(-1)
        self.given[module.layer_idx] = given[..., : key.shape[2]]
        return (given @ value.double()).to(query.dtype).transpose(1, 2).contiguous(), None

    def layer_of(self, module, key: Tensor) -> int:
        """The layer whose keys these are; Zamba's layers are one module."""
        layers = enumerate(getattr(self.cache, "layers", ()))
        return next((i for i, layer in layers if getattr(layer, "keys", None) is key), module.layer_idx)

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor, held: Mapping[int, Tensor]) -> Tensor:
        """Logits (b, t, v) of new tokens, each layer seeing only `held` of the earlier ones."""
        self.held = held
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {} if self.model.config.model_type == "opt" else {"position_ids": positions}
        return self.model(ids, attention_mask=mask, **hand_cache(self.cache), **options).logits


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
