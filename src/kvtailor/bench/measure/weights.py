"""The weights of a model that one token multiplies, counted from its own modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Weights"]

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights that one token multiplies.

    Attributes:
        body: of all layers; of experts, those that a token is sent to.
        head: of the output head.
    """

    body: int
    head: int

    @classmethod
    def of(cls, model: nn.Module) -> Weights | None:
        """Counted from the model's own modules; None where it has matrices whose use is not known.

        A linear layer counts by its sizes, so that packed (quantised) weights count as what they stand for. Of a
        mixture of experts counts the share of experts that a token is sent to, by its config.
        """
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is None or _size_of(head) is None:
            return None
        experts, chosen = _first_of(model, _EXPERTS), _first_of(model, _CHOSEN)
        every = shared_out = 0
        for name, module in model.named_modules():
            if module is head or isinstance(module, nn.Embedding):
                continue
            size = _size_of(module)
            if size is not None:
                if experts and ".experts." in name:
                    shared_out += size
                else:
                    every += size
                continue
            for what, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 1 or what.endswith("bias"):
                    continue
                if parameter.shape[0] != experts or parameter.ndim > 3:
                    return None
                if parameter.ndim == 2:
                    every += parameter.numel()
                else:
                    shared_out += parameter.numel()
        if shared_out and not (experts and chosen):
            return None
        return cls(body=every + (shared_out // experts * chosen if experts and chosen else 0), head=_size_of(head) or 0)


def _first_of(model: Any, names: Sequence[str]) -> int | None:
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    found = (getattr(text, name, None) for name in names)
    return next((int(value) for value in found if value), None)


def _size_of(module: Any) -> int | None:
    """Weights of a linear layer; None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    # transformers' name for a linear layer that stores its matrix the other way round.
    return int(module.weight.numel()) if type(module).__name__ == "Conv1D" else None
