"""KeyDiff: the tokens whose keys point away from the others.

*Idea*: keys of tokens that receive much attention lie apart from the bulk. The mean of all keys, each divided by its
length, stands for the bulk, and the tokens whose keys are least similar to it stay.

*Paper*: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments", arXiv 2504.15364, section 3; our score = minus its cosine similarity to the anchor, the mean of the
normalised keys.

*Source*: the paper and a reading of kvpress (Apache-2.0); nothing was taken.

*Departs*: the paper takes a prompt in blocks and cuts after each; here that is so if the prompt comes in chunks. While
decoding it cuts at each token; here once the cache is `slack` tokens past the budget. `recent` stands for the paper's
variant that also keeps a sliding window; 0 is the plain method.

*Cost*: no evidence; two products with the keys, one kv head at a time, so the scratch is float32 (b, n, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["KeyDiff"]


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Scorer):
    """Minus the cosine between each key and the mean direction of its head's keys.

    Attributes:
        recent: newest tokens that always stay.
    """

    recent: int = 0
    slack: ClassVar[int | None] = 32
    serves: ClassVar[Serves] = Serves(
        latents="it compares keys by their direction, and the direction of a latent is that of no head's key"
    )

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise ValueError(f"keydiff: recent must be 0 or more tokens, found {self.recent}; the paper uses 0")

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 from -1 to 1; 0 for a key of zeros, which points nowhere."""
        heads = zip(held.keys.unbind(1), held.valid.unbind(1), strict=True)
        return torch.stack([_dissimilarity(keys.float(), valid) for keys, valid in heads], dim=1)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """(6 d + 2) n: norms, the sum of directions and the products take 2 d each, two divisions go to each token."""
        return tokens * (6 * size + 2)


def _dissimilarity(keys: Tensor, valid: Tensor) -> Tensor:
    """(b, n) of one kv head, from float32 keys (b, n, d)."""
    length = torch.linalg.vector_norm(keys, dim=-1)
    inverse = torch.where(length > 0, 1 / length, 0.0)
    # The number of tokens does not change a direction, so the sum does for the mean.
    anchor = (inverse * valid)[:, None] @ keys
    anchor = torch.nn.functional.normalize(anchor, dim=-1)
    return -(keys @ anchor.transpose(1, 2))[..., 0] * inverse
