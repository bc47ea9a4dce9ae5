"""KVgrad: what the repetition attends to, weighed by how much the model's last layer depends on it.

*Idea*: KVzip+ weighs a probability by what the value adds to the residual stream, over the length of the hidden state
that it is added to. How much that matters further up it only guesses. The gradient of the last layer's hidden states by
the layer's attention says it to first order, for each repeated token.

*Paper*: "KVgrad" (openreview cg1wTCJjjk); our `chunk` = its pieces of 512 tokens. `lead` and `sinks` are KVzip's.

*Source*: its code in kvpress (Apache-2.0, pull request 279), by its authors; the paper itself could not be read.

*Departs*: in a plan the word is a preset that brings the pool over all layers and heads; `+ uniform` takes it off. As
in that code, the gradient is that of the sum of squares, over the repeated tokens, of the hidden states behind the last
layer and before the last norm, by what the attention module gives back. A score s is given as s / (1 + s), as in
`kvzip_plus`. The rest is as `kvzip` departs from its paper. Refused where a layer has a window or a state of its own,
where layers share keys or heads lie on several processes, where logits are capped or a layer has learned sinks, and
where a probe of three tokens gives no gradient.

*Cost*: that of `kvzip_plus`, and for each piece one more forward and a backward. Meanwhile there is a second copy of
the whole context's keys and values, and what a piece of tokens leaves in every layer for the backward; a smaller
`chunk` makes the second of these less. The model's parameters are not to learn meanwhile, and are as before afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.method import Serves
from kvtailor.score.by_repetition.kvzip_plus import KVzipPlus
from kvtailor.score.contract import Scorer
from kvtailor.score.kvzip import check_pieces
from kvtailor.types import Held, Needs, Repetition

__all__ = ["KVgrad"]


@dataclass(frozen=True, kw_only=True)
class KVgrad(Scorer):
    """Highest attention during a repetition of the context, weighed by gradients.

    Attributes:
        chunk: at most so many tokens are repeated in one pass.
        lead: tokens before a piece that introduce it.
        sinks: first tokens of each row that always stay; the earliest outranks all.
    """

    chunk: int = 512
    lead: int = 8
    sinks: int = 4
    serves: ClassVar[Serves] = Serves(
        latents="it weighs values by the output projection of their heads, and a latent is that of no single head",
        softcap=False,
        sinks=False,
    )

    def __post_init__(self) -> None:
        check_pieces(self, "kvgrad", chunk="its authors use 512", lead="KVzip's is 8", sinks="0 protects none")

    def split_refusal(self, *, heads: int, ranks: int) -> str | None:
        """Gradients through parts of a model were not tried."""
        if ranks == 1:
            return None
        return f"kvgrad takes gradients through a whole model, and this one lies on {ranks} processes: take kvzip_plus"

    @property
    def needs(self) -> Needs:
        how = Repetition(chunk=self.chunk, lead=self.lead, sinks=self.sinks, weighted=True, graded=True)
        return Needs(reconstruction=how, output=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: 0 to 1 for the context, from 2 on for what came after it, and more for sinks.

        Raises:
            ValueError: the context was not repeated.
        """
        return KVzipPlus(chunk=self.chunk, lead=self.lead, sinks=self.sinks).score(held)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """2 n: the fraction; the repetition is counted where it is run."""
        return 2 * tokens
