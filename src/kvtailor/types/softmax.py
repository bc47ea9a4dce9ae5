"""What a model's softmax has besides the factor: a cap on its logits, and a learned sink for each query head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PLAIN_SOFTMAX", "Softmax"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Softmax:
    """How a model makes probabilities of the scaled products l = q k * scaling of a query with the keys that it sees.

    A logit is l, or softcap * tanh(l / softcap). A sink is one more logit that belongs to no token and has the value 0:
    it takes its share of the probability, so that the shares of the tokens add up to less than 1.
    Whatever else is added to logits (a mask, `log_weight`) is added after the cap.

    Attributes:
        softcap: above 0; None where logits are not capped (Gemma 2: 50).
        sinks: (q,) float32, one logit for each query head; None where there are none (gpt-oss).
    """

    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the factor is all there is."""
        return self.softcap is None and self.sinks is None

    @property
    def twists(self) -> dict[str, str]:
        """What there is beside the factor, a clause about the model by the field's name, as `Serves` has it, too."""
        told = {
            "softcap": f"caps its attention logits (softcap={self.softcap})",
            "sinks": "has learned attention sinks",
        }
        return {name: clause for name, clause in told.items() if getattr(self, name) is not None}

    @property
    def capped(self) -> Softmax:
        """The same cap without learned sinks: of parts whose log-sum-exp the sinks join later."""
        return self if self.sinks is None else Softmax(softcap=self.softcap)

    def cap_(self, logits: Tensor) -> Tensor:
        """Return scaled products as logits: in place where there is a cap, else as they are."""
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def of_heads(self, first: int, count: int) -> Softmax:
        """The softmax of `count` query heads from the head `first` on."""
        if self.sinks is None:
            return self
        return Softmax(softcap=self.softcap, sinks=self.sinks[first : first + count])

    def sink_rows(self, rows: int, heads: int) -> Tensor | None:
        """(b * h, g, 1) sinks as logits of each owner's query heads; None where there are none.

        Args:
            rows: b. heads: h.
        """
        if self.sinks is None:
            return None
        return self.sinks.view(1, heads, -1, 1).expand(rows, -1, -1, -1).flatten(0, 1)

    def probabilities_(self, logits: Tensor) -> Tensor:
        """Return the probabilities of logits, in place: along the last axis they add up to 1 less the sink's share.

        Args:
            logits: (..., q, t, n) float32 of the query heads that `sinks` is of, capped already.
        """
        if self.sinks is None:
            return torch.softmax(logits, -1, out=logits)
        share = (logits.logsumexp(-1, keepdim=True) - self.sinks[:, None, None]).sigmoid_()
        return torch.softmax(logits, -1, out=logits).mul_(share)


PLAIN_SOFTMAX = Softmax()
