"""How many forwards of a cache were replayed, and why the others were not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ReplayCounts"]


@dataclass(frozen=True, kw_only=True)
class ReplayCounts:
    """The forwards of a cache that was made with `graphs=True`.

    Attributes:
        replayed: decoded tokens that came by steps which are recorded once and replayed. The first step of each
            recording, which is run as it is, is one of them.
        recordings: how often a step was recorded.
        plain: other forwards, prompts among them; they ran as without `graphs=True`.
        reasons: why they did, in words, and how many for each reason.
    """

    replayed: int = 0
    recordings: int = 0
    plain: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
