"""Compactor: keys that no others can stand for, and tokens that the text around them looks at.

*Idea*: two scores that see no query to come are added up, each in units of its own standard deviation: the leverage of
a key (`leverage`), and the attention that its token gets inside its chunk without a causal mask (`noncausal`). The more
is to go, the more weighs leverage.

*Paper*: "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores", arXiv 2507.08143.

*Source*: the paper's abstract, and a reading of kvpress (Apache-2.0), whose defaults these are, and of the paper's own
engine (MIT), which blends with 0.5; nothing was taken.

*Departs*: what `leverage` and `noncausal` depart in. Deviations are those of a row's tokens over all heads of a layer,
where kvpress takes those of the whole batch. Means are not taken off, which changes no order. The share that goes is
counted over all tokens of the row, those among them that went before.

*Cost*: that of `leverage` and of `noncausal`, whose queries are held until the first token is decoded, and a few
passes over their scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.score.contract import Scorer
from kvtailor.score.leverage.leverage import Leverage
from kvtailor.score.leverage.noncausal import NonCausal
from kvtailor.types import HeadShare, Held, Needs
from kvtailor.types.late_checks import send

__all__ = ["Compactor"]

# Below it, a score that hardly varies would be blown up.
_FLAT = 1e-6


@dataclass(frozen=True, kw_only=True)
class Compactor(Scorer):
    """Leverage and non-causal attention, blended.

    Attributes:
        blending: weight of the leverage beside that of the attention, 1; None: the share of the row's tokens that the
            budget has no room for.
        sinks: first tokens of each row that score highest and are no part of either score.
        recent: newest tokens that always stay and are no part of either score.
        chunk, rows: as in `noncausal`.
        sketch, state: as in `leverage`.
    """

    blending: float | None = None
    sinks: int = 8
    recent: int = 4
    chunk: int = 256
    rows: int = 1024
    sketch: int = 48
    state: int = 0
    serves: ClassVar[Serves] = Serves(
        latents="it measures keys and values as such, and a latent is that of no single head",
        softcap=False,
        sinks=False,
    )

    def __post_init__(self) -> None:
        if self.blending is not None and not self.blending >= 0:
            raise ValueError(f"compactor: blending must be 0 or more, found {self.blending}; the paper's code has 0.5")
        for name, default in (("sinks", 8), ("recent", 4)):
            found = getattr(self, name)
            if found < 0:
                raise ValueError(f"compactor: {name} must be 0 or more tokens, found {found}; kvpress uses {default}")
        self._parts()

    @property
    def needs(self) -> Needs:
        leverage, attention = self._parts()
        return leverage.needs | attention.needs

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, not negative; the sinks lie above all others of their row and head.

        Raises:
            ValueError: what the two parts raise; or no budget was given where `blending` follows it.
        """
        sink = held.valid & (held.positions < held.first[:, None, None] + self.sinks)
        inner = replace(held, valid=held.valid & ~sink & ~held.recent(self.recent), front=None)
        leverage, attention = (part.score(inner) for part in self._parts())
        blended = self._weight(held) * _in_deviations(leverage, inner.valid, held.share)
        blended = (blended + _in_deviations(attention, inner.valid, held.share)).masked_fill(~inner.valid, 0.0)
        return torch.where(sink, blended.amax(-1, keepdim=True) + 1.0, blended)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """Those of both parts, and for each token 4 to measure each deviation, 2 divisions, 2 to blend."""
        parts = (part.flops(tokens=tokens, group=group, size=size) for part in self._parts())
        return sum(parts) + 12 * tokens

    def _parts(self) -> tuple[Leverage, NonCausal]:
        return Leverage(sketch=self.sketch, state=self.state), NonCausal(chunk=self.chunk, rows=self.rows)

    def _weight(self, held: Held) -> Tensor | float:
        """(b, 1, 1) float32, or one number: what leverage is multiplied by."""
        if self.blending is not None:
            return self.blending
        if held.budget is None:
            raise ValueError("compactor blends by the budget, but the layer came without; give `blending`")
        kept = send(held.budget, held.first.device).float() / (held.seen - held.first).clamp(min=1)
        return (1.0 - kept).clamp(0.0, 1.0)[:, None, None]


def _in_deviations(scores: Tensor, member: Tensor, share: HeadShare) -> Tensor:
    """(b, h, n) scores over the standard deviation of a row's members, of all heads of the layer."""
    found = scores.double().masked_fill(~member, 0.0)
    count = share.sum(member.sum((1, 2)))
    mean = share.sum(found.sum((1, 2))) / count.clamp(min=1)
    apart = (found - mean[:, None, None]).masked_fill(~member, 0.0).square().sum((1, 2))
    deviation = (share.sum(apart) / (count - 1).clamp(min=1)).sqrt().clamp(min=_FLAT)
    return (found / deviation[:, None, None]).float()
