"""Leverage: the tokens whose keys no other keys can stand for.

*Idea*: the leverage of a row of a matrix says how much of a direction of the rows' span rests on that row. Tokens whose
keys, before the rotation and less their mean, have much of it cannot be made up for by others. No query is looked at.

*Paper*: "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores", arXiv 2507.08143;
our `sketch` = the dimension of its sketch, 48.

*Source*: the paper's abstract, and a reading of kvpress (Apache-2.0) and of the paper's own engine (MIT); nothing was
taken.

*Departs*: where a key has no more channels than the sketch would leave, the exact leverage is taken: a sketch keeps the
span then, and so the leverage. All heads share one sketch. As in kvpress the matrix is that of the whole text; the
paper's own engine takes pieces of 512. Scores are not normalised over a layer, which leaves the order as it is. Keys
are turned back to what they were before the rotation, where those implementations take them from the hidden states.

*Cost*: no evidence; the keys three times, 2 n d k + 3 n k^2 operations for k channels of the sketch, float64, 2048
tokens of one kv head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.ops.lanes.leverage import gaussian_sketch, gram, leverage_of, mean_of
from kvtailor.ops.lanes.rotate import turn
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs
from kvtailor.types.late_checks import send

__all__ = ["Leverage"]


@dataclass(frozen=True, kw_only=True)
class Leverage(Scorer):
    """Statistical leverage of keys before their rotation.

    Attributes:
        sketch: channels of the random sketch; 0, or as many as a key has: none, the exact leverage.
        ridge: added to the diagonal of the Gram matrix.
        state: which draw of the sketch.
    """

    sketch: int = 48
    ridge: float = 0.01
    state: int = 0
    serves: ClassVar[Serves] = Serves(
        latents="it turns whole keys back by their positions, "
        "and of a latent layer's keys only the last channels are turned"
    )

    def __post_init__(self) -> None:
        if self.sketch < 0:
            raise ValueError(f"leverage: sketch must be 0 or more channels, found {self.sketch}; the paper uses 48")
        if not self.ridge > 0:
            raise ValueError(f"leverage: ridge must be above 0, found {self.ridge}; kvpress uses 0.01")

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 from 0 to 1.

        Raises:
            ValueError: no rotation was given.
        """
        if held.rotation is None:
            raise ValueError(
                "leverage scores keys as they were before their rotation, but no rotation was given; observe with "
                "Needs(rotation=True)"
            )
        ages = held.positions - held.first[:, None, None]
        size = held.keys.shape[-1]
        sketch = send(gaussian_sketch(size, self.sketch, self.state), held.keys.device) if self.sketched(size) else None
        scores = []
        for head in range(held.keys.shape[1]):
            keys = turn(held.keys[:, head].float(), -ages[:, head], held.rotation)
            member = held.valid[:, head]
            centre = mean_of(keys, member)
            spread = gram(keys, member, centre=centre, sketch=sketch)
            scores.append(leverage_of(keys, spread, self.ridge, centre=centre, sketch=sketch))
        return torch.stack(scores, 1)

    def sketched(self, size: int) -> bool:
        """Whether keys of so many channels are sketched."""
        return 0 < self.sketch < size

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """n (5 d + 3 k^2 + 2 k + 2 d k where there is a sketch): rotation and mean, Gram matrix, solution, its square.

        A key is turned by 3 operations a channel, and 2 more go to its mean. The factor of k^3 / 3 does not grow.
        """
        width = self.sketch if self.sketched(size) else size
        return tokens * (5 * size + 3 * width * width + 2 * width + (2 * size * width if self.sketched(size) else 0))
