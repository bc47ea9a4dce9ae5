"""Switched: one score for prompts, another while the cache decodes.

*Idea*: what is right to keep of a prompt is not what is right to keep while a model writes. Whatever comes as a prompt
or a turn is cut by the one score, and a cache that has grown by decoding is cut back by the other.

*Paper*: none; kvpress has it as a wrapper.

*Source*: kvpress's documentation (Apache-2.0); nothing was taken.

*Departs*: there each score has a budget of its own, and what is decoded may be cut alone; here a plan has one budget,
and a cut while decoding looks at all that is held, the prompt's tokens among it. The newest tokens that either score
keeps whatever their score, the larger number of both, always stay. A score that looks back at its own of the eviction
before is refused: it would get the other's.

*Cost*: the evidence of both, all the time, and the time of one of them at each eviction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs
from kvtailor.types.checked_returns import check_scores

__all__ = ["Switched"]

_SLACK = 64


@dataclass(frozen=True, kw_only=True)
class Switched(Scorer):
    """The score of now.

    Attributes:
        prompt: scores when a prompt, a turn or a part of one has come.
        decoding: scores when decoded tokens have. Its slack is that of both; 64 tokens where it has none.
    """

    prompt: Scorer
    decoding: Scorer
    examples: ClassVar[tuple[str, ...]] = (
        "switched(prompt=expected, decoding=retrieval)",
        "switched(prompt=snapkv, decoding=h2o)",
        "switched(prompt=kvzip, decoding=tova)",
    )

    def __post_init__(self) -> None:
        one, other = self.prompt.needs, self.decoding.needs
        if one.previous or other.previous:
            raise ValueError(
                "switched: a score that looks back at its own of the eviction before would get the other's: take one "
                "that does not, as atskv(momentum=0)"
            )
        if one.moments and other.moments and one.moments_skip != other.moments_skip:
            raise ValueError(
                f"switched: both scores take moments of queries, of which one leaves out the first {one.moments_skip} "
                f"and the other {other.moments_skip}: give them the same sinks"
            )
        if one.reconstruction and other.reconstruction and one.reconstruction != other.reconstruction:
            raise ValueError(
                "switched: both scores repeat the context, each in another way, and it is repeated once: let one of "
                "them be a score that does not"
            )

    @property
    def scope(self) -> str:
        return "prompt" if "prompt" in (self.prompt.scope, self.decoding.scope) else "layer"

    @property
    def slack(self) -> int:
        return self.decoding.slack or _SLACK

    @property
    def heads_alike(self) -> bool:
        return self.prompt.heads_alike and self.decoding.heads_alike

    @property
    def same_on_layers(self) -> bool:
        return self.prompt.same_on_layers and self.decoding.same_on_layers

    @property
    def needs(self) -> Needs:
        return self.prompt.needs | self.decoding.needs

    @property
    def recent(self) -> int:
        return max(self.prompt.recent, self.decoding.recent)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 of the score whose turn it is, from no more evidence than it declares.

        Raises:
            ValueError: what the score raises.
            MethodError: it gives something else than scores.
        """
        now = self._of(held)
        return check_scores(now, now.score(held.within(now.needs)), held.positions)

    def attention_scale(self, held: Held, *, group: int) -> Tensor | None:
        """That of the score whose turn it is."""
        return self._of(held).attention_scale(held, group=group)

    def flops(self, *, tokens: int, group: int, size: int) -> int | None:
        """Those of `prompt`: what is counted is a prefill."""
        return self.prompt.flops(tokens=tokens, group=group, size=size)

    def _of(self, held: Held) -> Scorer:
        return self.decoding if held.decoding else self.prompt
