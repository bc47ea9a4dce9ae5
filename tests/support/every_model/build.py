"""A tiny random model of any pair, whose attention is sharp."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from tests.support.every_model.pairs import Pair
from tests.support.every_model.shrink import shrunk
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["MOST_PARAMETERS", "NotBuilt", "build"]

MOST_PARAMETERS = 30_000_000


class NotBuilt(Exception):
    """Why there is no tiny model of a pair, as a sentence."""


def build(pair: Pair) -> Any:
    """Return a model of the pair, on the CPU in float32.

    Raises:
        NotBuilt: with the reason.
    """
    try:
        config = shrunk(CONFIG_MAPPING[pair.model_type])
        kind = getattr(transformers, pair.model_class)
        config = _own_config(config, kind)
        with torch.device("meta"):
            size = sum(each.numel() for each in kind._from_config(config).parameters())
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(_first_line(error)) from error
    if size > MOST_PARAMETERS:
        raise NotBuilt(f"its smallest form by rule has {size:,} parameters")
    torch.manual_seed(0)
    try:
        model = kind._from_config(config, dtype=torch.float32).eval()
    except Exception as error:
        raise NotBuilt(_first_line(error)) from error
    sharpen(model)
    return model


def _own_config(config: Any, kind: Any) -> Any:
    """The part of a configuration that a class of the mapping takes: the decoder's, where it is a decoder alone."""
    if isinstance(config, kind.config_class):
        return config
    text = config.get_text_config(decoder=True)
    return text if isinstance(text, kind.config_class) else config


@torch.no_grad()
def sharpen(model: torch.nn.Module) -> None:
    """Gives a random model attention that is far from uniform, so that what it may see matters."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "A_log" in name or not parameter.is_floating_point():
            continue
        if re.search(r"(^|[._])(q|k|query|key)_?(layer)?_?norm(\.|_|$)", name) and parameter.dim() == 1:
            parameter.add_(1.0)
        elif parameter.dim() == 2 or (parameter.dim() == 3 and "expert" in name):
            embeds = any(word in name for word in ("embed", "wte", "wpe"))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.0 if embeds else 0.25))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
