"""How far rounding alone takes a model's scores, measured on the model itself.

In half precision two exact ways to compute one attention differ, and by how much depends on the model and the text: on
the embedded model in bfloat16 transformers' own eager and sdpa differ by 0.027 nats in the mean token of plain text and
by 0.098 of odd text. A fixed tolerance would call that a fraud on some texts, or let one pass on others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtailor.bench.contestant import OTHER_ATTENTION, OWN, Contestant
from kvtailor.bench.subject import Subject

__all__ = ["tolerances_here"]

_LONGEST = 4096  # tokens, of which eager attention makes a whole matrix


def tolerances_here(
    subject: Subject,
    usual: tuple[float, float | None],
    differences: Tensor,
    score: Callable[[Contestant], Tensor],
    tokens: int,
) -> tuple[float, float | None]:
    """`usual`, or what the model's own two attentions differ by where that is more and is needed.

    Args:
        subject: the model.
        usual: largest and mean difference that are allowed at any rate; no mean in float32.
        differences: (t,) between the two sides that are to be judged.
        score: (t,) log-probabilities of the same tokens under the model's own cache; only called in half precision, and
            where `usual` is exceeded.
        tokens: of the longest sample.
    """
    worst, mean = usual
    sizes = differences.abs()
    fits = mean is None or (float(sizes.max()) <= worst and float(sizes.mean()) <= mean)
    if fits or subject.stock_attention is None or subject.dtype == torch.float32 or tokens > _LONGEST:
        return usual
    assert mean is not None
    rounding = (score(OTHER_ATTENTION) - score(OWN)).abs()
    return max(worst, float(rounding.max())), max(mean, float(rounding.mean()))
