"""CUR: the tokens whose keys and values are long beside those around them.

*Idea*: a CUR decomposition keeps rows of a matrix by their leverage. Squared lengths stand for the leverage of a key
and of a value, each as a share of that of its window of tokens, and their product is the score.

*Paper*: "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition" (CurDKV), arXiv 2509.15038; our
`sketch` = the channels of its Gaussian projection, 20.

*Source*: the paper's abstract and a reading of kvpress (Apache-2.0), whose defaults these are; nothing was taken.

*Departs*: by default nothing is projected and lengths are shares of their windows, as in kvpress. All heads share one
projection. A window in which all keys (or values) are zeros has shares of 0. When tokens are evicted again, windows are
cut from what is held.

*Cost*: no evidence; keys and values once, and a few passes over the scores; float32 scratch (b, n, d) of one kv head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.ops.lanes.leverage import gaussian_sketch
from kvtailor.ops.lanes.packed import pack
from kvtailor.score.contract import Scorer
from kvtailor.types import Held
from kvtailor.types.late_checks import send

__all__ = ["CUR"]

Of = Literal["product", "mean", "keys", "values"]


@dataclass(frozen=True, kw_only=True)
class CUR(Scorer):
    """Squared lengths of keys and values within windows of tokens.

    Attributes:
        of: what the two become: their product or mean, or one of them alone.
        window: tokens of a window, counted from the row's first held one; 0: shares are of all tokens.
        sinks: first tokens of each row that score highest.
        sketch: channels of a random projection of keys and values; 0: none. The paper's is 20.
        state: which draw of the projection.
    """

    of: Of = "product"
    window: int = 16
    sinks: int = 4
    sketch: int = 0
    state: int = 0
    serves: ClassVar[Serves] = Serves(latents="it measures keys and values, and a latent is that of no single head")

    def __post_init__(self) -> None:
        if self.of not in get_args(Of):
            raise ValueError(f"cur: of must be one of {get_args(Of)}, found {self.of!r}")
        for name, default in (("window", 16), ("sinks", 4), ("sketch", 20)):
            if getattr(self, name) < 0:
                raise ValueError(f"cur: {name} must be 0 or more, found {getattr(self, name)}; kvpress uses {default}")

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 from 0 to 1, which sums to 1 over a head's tokens before the sinks are set to 1."""
        # (b, h, n) each.
        keys, values = (self._shares(self._lengths(states), held.valid) for states in (held.keys, held.values))
        found = {"product": keys * values, "mean": (keys + values) / 2, "keys": keys, "values": values}[self.of]
        found = _share(found, found.sum(-1, keepdim=True))
        return found.masked_fill(held.valid & (held.positions < held.first[:, None, None] + self.sinks), 1.0)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """n (4 d + 7), and 4 d k more where keys and values are projected to k channels.

        A squared length takes 2 d, a share 2 (its part in the sum, and the division), the product 1, its share 2.
        """
        width, project = (self.sketch, 4 * size * self.sketch) if self.sketch else (size, 0)
        return tokens * (4 * width + 7 + project)

    def _lengths(self, states: Tensor) -> Tensor:
        """(b, h, n) float32: squared lengths of states (b, h, n, d)."""
        sketch = None
        if self.sketch:
            drawn = gaussian_sketch(states.shape[-1], self.sketch, self.state)
            sketch = send(drawn.float(), states.device)
        found = []
        for each in states.unbind(1):
            one = each.float() if sketch is None else each.float() @ sketch
            found.append(torch.linalg.vector_norm(one, dim=-1).square_())
        return torch.stack(found, 1)

    def _shares(self, lengths: Tensor, member: Tensor) -> Tensor:
        """(b, h, n) each of a member's squared lengths over those of its window."""
        lengths = lengths.masked_fill(~member, 0.0)
        if not self.window:
            return _share(lengths, lengths.sum(-1, keepdim=True))
        packed = pack(member, self.window)
        in_runs = packed.in_runs(lengths)
        return packed.back(_share(in_runs, in_runs.sum(-1, keepdim=True)))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole, 0.0)
