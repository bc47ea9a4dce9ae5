"""A vision-language model on a full cache whose dropped tokens are masked; it knows nothing of kvtailor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.support.seam import vision
from tests.support.seam.zoo import MaskedReference
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from kvtailor.hf.versions import hand_cache

__all__ = ["VisionReference", "next_token"]


class VisionReference(MaskedReference):
    """See `MaskedReference`. The images are encoded by the model's own attention; the text decoder's is masked."""

    NAME = "masked-vision-reference"

    def __init__(self, family: str, state: int = 0):
        AttentionInterface.register(self.NAME, self._attention)
        AttentionMaskInterface.register(self.NAME, self._mask)
        self.model = vision.build(family, attention=self.NAME, state=state)
        self.cache = DynamicCache()
        self.held: Mapping[int, Tensor] = {}
        self.layer, self.ignores, self.given = -1, (), {}

    @torch.no_grad()
    def read(self, inputs: Mapping[str, Tensor], held: Mapping[int, Tensor]) -> Tensor:
        """Logits (b, t, v) of what is new, each layer seeing only `held` of the earlier tokens."""
        self.held = held
        return self.model(**inputs, **hand_cache(self.cache)).logits


def next_token(family: str, model: Any, token: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The inputs of one decoded token (b, 1) after what `mask` (b, n) covers, at the positions of generate()."""
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    given = {"input_ids": token, "attention_mask": mask}
    if family in vision.MROPE:
        given["position_ids"] = mask.sum(-1, keepdim=True) - 1 + model.model.rope_deltas
    return given
