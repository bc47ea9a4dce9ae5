"""KVzip+: what the repetition attends to, weighed by what it adds to the residual stream.

*Idea*: KVzip takes the highest attention probability that a token gets while the model repeats its context. A large
probability on a short value changes little. So each probability counts times the length of the value as the output
projection maps it, over the length of the hidden state that it is added to, and the highest of these is the score.

*Paper*: "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", arXiv 2601.07891, where it is the teacher; our `chunk`,
`lead` and `sinks` are KVzip's.

*Source*: reviews of the paper, and its code in kvpress (Apache-2.0) for what the lengths are of.

*Departs*: in a plan the word is a preset that brings the pool over all layers and heads; `+ uniform` takes it off. As
in that code, the hidden state is the one that the attention module gets, behind the norm before it, and lengths are
Euclidean. A score s is given as s / (1 + s), which keeps every order and stays below 1, so that what came after the
context and the sinks outrank it, as in `kvzip`. The rest is as `kvzip` departs from its paper. Where several layers of
a model read one layer's keys and values it is refused, since each has an output projection of its own.

*Cost*: that of `kvzip`, and for each pass and layer one output projection of the piece's values for each query head. A
hook before each attention module reads lengths while the context is repeated, and is taken away again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.score.contract import Scorer
from kvtailor.score.kvzip import KVzip, check_pieces
from kvtailor.types import Held, Needs, Repetition

__all__ = ["KVzipPlus"]


@dataclass(frozen=True, kw_only=True)
class KVzipPlus(Scorer):
    """Highest weighed attention during a repetition of the context.

    Attributes:
        chunk: at most so many tokens are repeated in one pass.
        lead: tokens before a piece that introduce it.
        sinks: first tokens of each row that always stay; the earliest outranks all.
    """

    chunk: int = 2048
    lead: int = 8
    sinks: int = 4
    serves: ClassVar[Serves] = Serves(
        latents="it weighs values by the output projection of their heads, and a latent is that of no single head"
    )

    def __post_init__(self) -> None:
        check_pieces(self, "kvzip_plus", chunk="KVzip's is 2K", lead="KVzip's is 8", sinks="0 protects none")

    @property
    def needs(self) -> Needs:
        how = Repetition(chunk=self.chunk, lead=self.lead, sinks=self.sinks, weighted=True)
        return Needs(reconstruction=how, output=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: 0 to 1 for the context, from 2 on for what came after it, and more for sinks.

        Raises:
            ValueError: the context was not repeated.
        """
        found = held.reconstruction
        if found is not None:
            found = torch.where(found < 0, found, found / (1 + found))
        order = KVzip(chunk=self.chunk, lead=self.lead, sinks=self.sinks)
        return order.score(replace(held, reconstruction=found))

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """2 n: the fraction; the repetition is counted where it is run."""
        return 2 * tokens
