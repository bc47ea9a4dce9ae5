"""How much a fit tries: `quick`, `normal` and `thorough`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtailor.errors import UnknownName

__all__ = ["EFFORTS", "Effort", "effort_of"]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What is measured at most.

    Attributes:
        name: of it.
        first: windows of text, and documents of each family, that every candidate is measured on; stage 1 too.
        rest: how many more the promising ones are measured on.
        widths: bits that stage 1 tries.
        shares: shares of the tokens that stage 1 tries.
        by_head: stage 1 cuts single heads.
        trials: points of stage 2 beside the presets and stage 1's optimum.
        front: candidates that are measured at other memories as well.
        levels: of these memories, as shares of the uncompressed bytes.
        fitted: candidates that the proof has. presets: presets that it has beside them.
        windows: of text, and documents of each family, that the proof has at most.
        rounds: of times of a token, each behind a prompt of its own.
        reads_twice: scorers and presets that read a prompt twice (kvzip) are tried; each takes as long as five others.
    """

    name: str
    first: tuple[int, int]
    rest: tuple[int, int]
    widths: tuple[int, ...]
    shares: tuple[float, ...]
    by_head: bool
    trials: int
    front: int
    levels: tuple[float, ...]
    fitted: int
    presets: int
    windows: tuple[int, int]
    rounds: int = 5
    reads_twice: bool = True


EFFORTS: Mapping[str, Effort] = {
    each.name: each
    for each in (
        Effort(
            name="quick",
            first=(3, 1),
            rest=(5, 3),
            widths=(4, 2),
            shares=(0.5, 0.25, 0.1),
            by_head=False,
            trials=14,
            front=2,
            levels=(0.06, 0.125, 0.25, 0.5),
            fitted=2,
            presets=2,
            windows=(24, 5),
            rounds=3,
            reads_twice=False,
        ),
        Effort(
            name="normal",
            first=(4, 2),
            rest=(12, 6),
            widths=(8, 6, 4, 3, 2, 1),
            shares=(0.75, 0.5, 0.35, 0.25, 0.125, 0.06),
            by_head=False,
            trials=48,
            front=2,
            levels=(0.03, 0.06, 0.125, 0.25, 0.5),
            fitted=3,
            presets=3,
            windows=(100, 20),
        ),
        Effort(
            name="thorough",
            first=(8, 4),
            rest=(24, 12),
            widths=(8, 6, 5, 4, 3, 2, 1),
            shares=(0.75, 0.5, 0.35, 0.25, 0.125, 0.06, 0.03),
            by_head=True,
            trials=180,
            front=4,
            levels=(0.03, 0.06, 0.09, 0.125, 0.18, 0.25, 0.35, 0.5, 0.7),
            fitted=4,
            presets=4,
            windows=(400, 60),
        ),
    )
}


def effort_of(name: str | Effort) -> Effort:
    """Return an effort by its name, or one that was made elsewhere.

    Raises:
        UnknownName: there is none.
    """
    if isinstance(name, Effort):
        return name
    if name not in EFFORTS:
        raise UnknownName("effort", name, EFFORTS)
    return EFFORTS[name]
