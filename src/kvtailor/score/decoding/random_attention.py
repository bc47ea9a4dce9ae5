"""Random Attention: the whole prompt, and of what was decoded a random part, drawn anew at each eviction.

*Idea*: what a chain of thought needs again it states again, and each head holds a copy of its own, but the question is
stated once. So the prompt stays, and every other token gets a uniform random number, in each kv head another. A score
that is to mean anything must beat this at the same bytes, with the same prompt kept.

*Paper*: "Random Attention: Rethinking KV Cache Eviction for Efficient Reasoning", arXiv 2609.03430, section 3, equation
3; our `recent` = its buffer of r newest tokens, and our slack = its r decoded tokens between two evictions.

*Source*: the paper; its repository was not read.

*Departs*: a budget counts the `recent` tokens, where the paper holds them beside its budget K. The paper evicts only
while it decodes; here a prompt that is longer than the budget is cut by the same draw. What comes in a later turn
counts as decoded. The draw is a function of layer, head, token, tokens seen and `state`, so that a run can be
repeated.

*Cost*: no evidence, no extra memory, a few passes over the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.ops.lanes.drawn import uniform
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["RandomAttention"]


@dataclass(frozen=True, kw_only=True)
class RandomAttention(Scorer):
    """Uniform numbers in [0, 1), others at each eviction, and 1 more for the tokens of the prompt.

    Attributes:
        recent: newest tokens that always stay.
        prompt: keep the prompt; without it all tokens are drawn alike.
        state: which draw; any integer.
    """

    recent: int = 64
    prompt: bool = True
    state: int = 0
    slack: ClassVar[int | None] = 64
    heads_alike: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise ValueError(
                f"random_attention: recent must be 0 or more tokens, found {self.recent}; its paper has 64"
            )

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32."""
        times = held.seen - held.first[:, None, None]
        drawn = uniform(held, self.state, times)
        return drawn + (held.positions < held.prompt) if self.prompt else drawn

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """2 n: a division and an addition for each token; what comes before them is integers."""
        return 2 * tokens
