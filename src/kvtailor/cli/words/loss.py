"""A loss that records have, as verbs print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtailor.bench.measure.statistics import Estimate

__all__ = ["loss_words"]


def loss_words(loss: Estimate) -> str:
    """Return a loss over the windows of a text with its interval, where there are enough of them for one."""
    ends = loss.interval(4, signed=True)
    return f"{loss.value:+.4f} nats a token{f' ({ends})' if ends else ''}, {loss.count} windows"
