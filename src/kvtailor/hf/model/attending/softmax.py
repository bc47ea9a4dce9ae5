"""What a model's attention module hands to the attention function beside the states: read, or refused, never ignored.

`tests/seam/model/test_attention_arguments.py` compares the names below with every call of transformers' models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import PlanError, UnsupportedModel
from kvtailor.hf.versions import CACHE_ARGUMENTS
from kvtailor.plan import Plan
from kvtailor.types import PLAIN_SOFTMAX, HeadShare, Softmax

__all__ = ["CHANGES_NOTHING", "REFUSED", "SUPPORTED", "check_plan_softmax", "softmax_before", "softmax_of"]

SUPPORTED = frozenset({"s_aux", "scaling", "softcap"})
# What each changes, the end of a sentence.
REFUSED = {
    "block_indices": "which blocks of tokens each query reads (sparse attention)",
    "indices": "which tokens each query reads (sparse attention)",
    "position_bias": "a number that is added to each logit",
    "sinks": "attention sinks that differ from token to token",
}
# The mask has it (windows, causality, packed sequences), the states have it (positions, pictures), or it is about what
# a forward returns. Models hand on what their callers gave them, whether it is of use to an attention or not.
CHANGES_NOTHING = frozenset(
    {
        "assistant_tokenizer",
        "tokenizer",
        "attention_mask",
        "audio_attention_mask",
        "audio_embed_sizes",
        "audio_feature_lengths",
        "audio_input_features",
        "cache_params",
        "cache_position",
        "conv_mask",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deepstack_visual_embeds",
        "deterministic",
        "dropout",
        "feature_attention_mask",
        "image_grid_thw",
        "image_pixel_values",
        "image_position_ids",
        "image_sizes",
        "input_features",
        "input_features_mask",
        "input_ids",
        "inputs_embeds",
        "interpolate_pos_encoding",
        "is_causal",
        "is_first_iteration",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "mamba_attention_mask",
        "max_length_k",
        "max_length_q",
        "mm_encoder_outputs",
        "mm_token_type_ids",
        "moe_mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        *CACHE_ARGUMENTS,
        "per_layer_inputs",
        "pixel_attention_mask",
        "pixel_mask",
        "pixel_values",
        "pixel_values_videos",
        "ple_input_ids",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "rope_deltas",
        "second_per_grid_ts",
        "seq_idx",
        "sliding_window",
        "synced_gpus",
        "token_type_ids",
        "use_audio_in_video",
        "use_cache",
        "video_grid_thw",
        "video_position_ids",
        "video_second_per_grid",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "visual_pos_masks",
    }
)
# Of transformers' own sdpa, which a layer without our keys calls.
_OF_SDPA = frozenset({"position_bias"})


def softmax_of(module: torch.nn.Module, heads: int, given: Mapping[str, Any], *, of_sdpa: bool = False) -> Softmax:
    """Return the softmax of an attention module from what it hands to the attention function.

    Args:
        module: a layer's attention.
        heads: its query heads in this process.
        given: the keyword arguments that it hands over beside its states, the mask and the scaling.
        of_sdpa: whether what transformers' own sdpa can do is taken care of elsewhere.

    Raises:
        UnsupportedModel: it hands over what changes its attention and what kvtailor does not compute.
    """
    for name in given.keys() - SUPPORTED - CHANGES_NOTHING:
        if given[name] is None or (of_sdpa and name in _OF_SDPA):
            continue
        what = REFUSED.get(name)
        if what is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} hands {name}= to its attention, {what}, which kvtailor does not support"
            )
        raise UnsupportedModel(
            f"{type(module).__name__} hands {name}= to its attention, and kvtailor does not know whether that changes "
            "the result; if it comes from your own call of the model, leave it out"
        )
    softcap, sinks = given.get("softcap"), given.get("s_aux")
    if softcap is None and sinks is None:
        return PLAIN_SOFTMAX
    if softcap is not None and not float(softcap) > 0:
        raise UnsupportedModel(
            f"{type(module).__name__} caps its attention logits at softcap={softcap}, and a cap is above 0; set "
            "attn_logit_softcapping of its configuration to None, or to a number above 0"
        )
    return Softmax(
        softcap=None if softcap is None else float(softcap),
        sinks=None if sinks is None else _own_sinks(module, sinks, heads),
    )


def softmax_before(module: torch.nn.Module, share: HeadShare) -> Softmax:
    """Return the softmax that an attention module is going to hand over, by its attributes.

    What acts before a forward goes by it: the check of a plan, and a loaded cache that others are made from. A forward
    then says for certain.

    Args:
        module: a layer's attention.
        share: which of the model's kv heads this process has, and so of its query heads.
    """
    softcap, sinks = getattr(module, "attn_logit_softcapping", None), getattr(module, "sinks", None)
    if not isinstance(sinks, Tensor):
        return Softmax(softcap=float(softcap)) if softcap else PLAIN_SOFTMAX
    own = _local(sinks)
    # Outside of a forward, a model of several processes may still have the sinks of all of them.
    heads = getattr(getattr(module, "config", None), "num_attention_heads", 0)
    own = share.own(own, 0) if share.ranks > 1 and own.numel() == heads else own
    return Softmax(softcap=float(softcap) if softcap else None, sinks=own.reshape(-1).float())


def check_plan_softmax(plan: Plan, modules: Iterable[torch.nn.Module], share: HeadShare) -> None:
    """Raise where a method of a plan does not know the softmax of these attention modules, before any forward.

    Raises:
        PlanError: with a sentence for each method.
    """
    found = [softmax_before(module, share) for module in modules]
    faults = [fault for softmax in found if not softmax.plain for fault in plan.softmax_faults(softmax)]
    if faults:
        raise PlanError(str(plan), list(dict.fromkeys(faults)))


def _local(sinks: Tensor) -> Tensor:
    whole = sinks.detach()
    if type(whole) is Tensor:
        return whole
    from torch.distributed.tensor import DTensor

    return whole.to_local() if isinstance(whole, DTensor) else whole


def _own_sinks(module: torch.nn.Module, sinks: Tensor, heads: int) -> Tensor:
    """(q,) float32 of this process's query heads."""
    own = _local(sinks)
    if own.numel() != heads:
        raise UnsupportedModel(
            f"{type(module).__name__} has {own.numel()} learned sinks for {heads} query heads (shape "
            f"{tuple(own.shape)}); kvtailor supports one for each query head"
        )
    return own.reshape(-1).float()
