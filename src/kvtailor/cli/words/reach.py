"""What share of a model's cache compression can reach, which is little where most layers keep a state or a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry

__all__ = ["Reach", "reachable", "say_reachable"]

# The length that is shown where neither the user nor the configuration names one.
_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Bytes of one row without a plan.

    Attributes:
        tokens: that the row has seen.
        compressed: of keys and values that a plan compresses.
        windows: of the model's own sliding windows.
        states: of constant size; None where they are not known before a run.
    """

    tokens: int
    compressed: int
    windows: int
    states: int | None

    @property
    def share(self) -> float | None:
        """Part of all bytes that a plan can make smaller; None where that is not known."""
        total = None if self.states is None else self.compressed + self.windows + self.states
        return self.compressed / total if total else None


def reachable(geometry: Geometry, element: int, tokens: int | None) -> Reach:
    """Return what a row of a model's cache takes.

    Args:
        geometry: of the model.
        element: bytes of an element of the cache's dtype.
        tokens: that the row has seen; None: the model's positions.
    """
    seen = tokens or geometry.max_positions or _TOKENS
    compressed = element * seen * sum(shape.token_elements for shape in geometry.compressed_shapes)
    return Reach(
        tokens=seen,
        compressed=compressed,
        windows=geometry.full_bytes(1, seen, element) - compressed,
        states=geometry.state_bytes(element),
    )


def say_reachable(reach: Reach) -> list[str]:
    """The same as sentences; none where all of the cache is within reach."""
    from kvtailor.bench.report.words import byte_text

    if not reach.windows and reach.states == 0:
        return []
    own = [f"{byte_text(reach.windows)} in windows of the model's own"] if reach.windows else []
    if reach.states is None:
        own.append("states whose bytes are not known before a run")
    elif reach.states:
        own.append(f"{byte_text(reach.states)} in states of constant size")
    share = "" if reach.share is None else f": compression reaches {reach.share:.1%} of the cache"
    if reach.share:
        share += f", and no plan makes all of it more than {1 / (1 - reach.share):.3g} times smaller"
    return [
        f"at {reach.tokens} tokens a row takes {byte_text(reach.compressed)} of keys and values that a plan "
        f"compresses, and {' and '.join(own)}{share}"
    ]
