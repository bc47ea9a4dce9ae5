"""What a forward of a model was asked for, where that is a plain decoded token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.hf.versions import CACHE_ARGUMENTS

__all__ = ["DecodedToken", "decoded_token"]

_TENSORS = ("input_ids", "attention_mask", "position_ids")
# A value with which each of these changes nothing about the logits of one token.
_WITHOUT_EFFECT: Mapping[str, Sequence[object]] = {
    "use_cache": (None, True),
    "return_dict": (None, True),
    "logits_to_keep": (0, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


@dataclass(frozen=True, kw_only=True)
class DecodedToken:
    """One new token of each row.

    Attributes:
        tokens: (b, 1) int64.
        positions: (b or 1, 1) at which they stand.
        mask: (b, columns) of all that was seen and these tokens, 0 for padding; None: nothing is padding.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None


def decoded_token(args: Sequence[Any], given: Mapping[str, Any], device: torch.device) -> DecodedToken | str:
    """Return the decoded token for which a model was called, or why the call is none, in words.

    Nothing on the device is read. Whatever is not known here is a reason: the list of what is known is closed.

    Args:
        args: of the call, by position.
        given: of the call, by name.
        device: of the model.
    """
    if args:
        return "arguments came by position"
    for name, value in given.items():
        if name in _TENSORS or name in CACHE_ARGUMENTS:
            continue
        allowed = _WITHOUT_EFFECT.get(name, (None,))
        # By type as well: 1 equals True, and a tensor equals nothing that could be looked at without a wait.
        if not any(type(value) is type(each) and value == each for each in allowed):
            return f"{name} was given" if value is not None else f"{name} was None"
    tokens, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return "there were no input_ids (b, t)"
    if tokens.shape[1] != 1:
        return "a prompt, a turn or a draft of several tokens"
    if not isinstance(positions, Tensor):
        return "there were no position_ids"
    if positions.ndim != 2 or positions.shape[0] not in (1, tokens.shape[0]) or positions.shape[1] != 1:
        return "position_ids were not (b, 1)"
    if tokens.is_floating_point() or positions.is_floating_point():
        return "input_ids or position_ids were no integers"
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "attention_mask was not (b, columns)"
    if any(each is not None and each.device != device for each in (tokens, mask, positions)):
        return "input lay on another device than the model"
    return DecodedToken(tokens=tokens, positions=positions, mask=mask)
