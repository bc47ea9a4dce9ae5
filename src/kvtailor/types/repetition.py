"""A second reading in which the model repeats its context."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Repetition"]


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """How the model repeats its context, for methods that need the attention of a repetition.

    Attributes:
        chunk: at most so many tokens of a row are repeated in one pass.
        lead: tokens before a piece of the context that introduce it.
        sinks: a row's first tokens, with which the tokens of every piece share the attention.
        queries: at most so many queries spread over all that a row repeats are kept until the context is compressed.
        weighted: each probability counts times the length of what the value becomes in the layer's output, over the
            length of the hidden state that the query was made from. Where it is, `Needs.output` is needed, too.
        graded: with `weighted`, the length of a gradient stands in the place of one over the hidden state's: that of
            the sum of squares of the last layer's hidden states, by what the layer's attention adds at the query's
            token.
        mean_group: of each query head the highest counts, and of these the mean over the group; else the highest of
            the group.
    """

    chunk: int
    lead: int
    sinks: int
    queries: int = 0
    weighted: bool = False
    graded: bool = False
    mean_group: bool = False

    def __or__(self, other: Repetition | None) -> Repetition:
        """One repetition that serves both: a method that asks for queries takes them of any."""
        if other is None:
            return self
        leading = other if self.queries and not other.queries else self
        return replace(
            leading,
            queries=max(self.queries, other.queries),
            weighted=self.weighted or other.weighted,
            graded=self.graded or other.graded,
            mean_group=self.mean_group or other.mean_group,
        )
