"""When the recipe trains on what: contexts grow by phases, the learning rate warms up, stays, and falls at the end."""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.errors import ArgumentError

__all__ = ["PHASES", "Phase", "parse_phases", "phase_at", "rate_at"]

PHASES = {
    "demo": (
        "256:4096:300:0.3,512:8192:650:0.6,512:8192:300:0.4,1024:8192:600:0.4,2048:8192:350:0.45,4096:8192:270:0.35"
    ),
    "demo-draft": "256:4096:150:0.7,512:8192:220:0.7,2048:8192:30:0.7",
}


@dataclass(frozen=True)
class Phase:
    """Steps at one context length.

    Attributes:
        length: tokens per row.
        tokens: tokens per step, a multiple of ``length``.
        steps: number of steps.
        natural: share of rows that are windows of the corpus, 0.0 to 1.0.
    """

    length: int
    tokens: int
    steps: int
    natural: float


def parse_phases(text: str) -> list[Phase]:
    """Phases from ``length:tokens:steps:natural`` joined by commas.

    Raises:
        ArgumentError: a part is not of that form, or its tokens are no multiple of its length.
    """
    phases = []
    for part in text.split(","):
        numbers = part.split(":")
        if len(numbers) != 4 or int(numbers[1]) % int(numbers[0]):
            raise ArgumentError(
                f"asked for phase {part!r}: give length:tokens:steps:natural, tokens a multiple of length"
            )
        phases.append(Phase(int(numbers[0]), int(numbers[1]), int(numbers[2]), float(numbers[3])))
    return phases


def phase_at(step: int, phases: list[Phase]) -> Phase:
    """The phase that 0-based ``step`` belongs to."""
    for phase in phases:
        if step < phase.steps:
            return phase
        step -= phase.steps
    return phases[-1]


def rate_at(step: int, steps: int, warmup: int, decay: float) -> float:
    """Share of the peak learning rate at 0-based ``step``: up over ``warmup`` steps, down over the last ``decay``."""
    return min(1.0, (step + 1) / warmup, (steps - step) / max(1.0, decay * steps))
