"""KVzip: the tokens that the model looks at when it repeats its context.

*Idea*: a cache from which the model can repeat its context serves any later question. So the model repeats the context
from the full cache, piece by piece, with the right words fed: a token is worth the highest attention that any query of
that repetition gives it.

*Paper*: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", arXiv 2505.23416, section 3; our
`chunk` = its m, 2K, our `lead` = the last tokens of the piece before, 8.

*Source*: the paper and its official code (MIT), for facts: the tokens of a system prompt share every softmax.

*Departs*: the paper pools the tokens of all layers and heads, which a score alone does not: in a plan the word `kvzip`
is a preset that brings that pool, and `kvzip + uniform`, equal budgets, is another method. `sinks` first tokens always
stay and share every softmax, in place of a system prompt, which is not recognised here. The instruction's words are our
own and no chat turn is opened around them. Pieces of a row are equally long, where the paper's last one is shorter, and
shorter than `chunk` where the model has no positions for more. A token that came after the context outranks it, the
newest most, where a plan evicts while decoding (`slack`); by default nothing is evicted after the context, as
published.

*Cost*: the context is fed a second time, and its full cache held meanwhile, so no chunked prefill bounds the peak. For
each head and piece of m tokens m (2 m + s) logits more, s for instruction and sinks, in blocks; 4 bytes per token and
kv head until the context is compressed. Where attention is most of a prefill, as in the small embedded model, the
repetition takes longer than the context did: a prefill under `kvzip` takes as long as four to five under `snapkv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs, Repetition

__all__ = ["KVzip", "check_pieces"]


class _InPieces(Protocol):
    """What scores by a repetition of the context in pieces."""

    @property
    def chunk(self) -> int: ...
    @property
    def lead(self) -> int: ...
    @property
    def sinks(self) -> int: ...


def check_pieces(method: _InPieces, name: str, *, chunk: str, lead: str, sinks: str) -> None:
    """Raise `ValueError` where a length cannot be; the texts say what is usual for each."""
    if method.chunk < 1:
        raise ValueError(f"{name}: chunk must be at least 1 token, found {method.chunk}; {chunk}")
    if method.lead < 0:
        raise ValueError(f"{name}: lead must be 0 or more tokens, found {method.lead}; {lead}")
    if method.sinks < 0:
        raise ValueError(f"{name}: sinks must be 0 or more tokens, found {method.sinks}; {sinks}")


@dataclass(frozen=True, kw_only=True)
class KVzip(Scorer):
    """Highest attention during a repetition of the context.

    Attributes:
        chunk: at most so many tokens are repeated in one pass.
        lead: tokens before a piece that introduce it.
        sinks: first tokens of each row that always stay; the earliest outranks all.
    """

    chunk: int = 2048
    lead: int = 8
    sinks: int = 4

    def __post_init__(self) -> None:
        check_pieces(self, "kvzip", chunk="the paper uses 2K", lead="the paper uses 8", sinks="0 protects none")

    @property
    def needs(self) -> Needs:
        return Needs(reconstruction=Repetition(chunk=self.chunk, lead=self.lead, sinks=self.sinks))

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: 0 to 1 for the context, from 2 on for what came after it, and more for sinks.

        Raises:
            ValueError: the context was not repeated.
        """
        if held.reconstruction is None:
            raise ValueError(
                "kvzip scores by a repetition of the context, and there was none: prefill the context with "
                "kvtailor.prefill(model, input_ids, plan=plan)"
            )
        age = held.positions - held.first[:, None, None]
        newest = (held.seen - held.first)[:, None, None]
        score = torch.where(held.reconstruction < 0, (2 + age).float(), held.reconstruction)
        return torch.where(age < self.sinks, (2 + newest + self.sinks - age).float(), score).float()

    def attention_scale(self, held: Held, *, group: int) -> Tensor:
        """(b,) ones: the score of a token of the context is one probability, the highest."""
        return torch.ones_like(held.first, dtype=torch.float32)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """0: scores are only chosen here; the repetition is counted where it is run."""
        return 0
