"""Orthogonal: random directions, all kv heads of a layer together; the control that has to fail.

*Idea* Projecting on random directions keeps rank / width of the energy, whatever the states are. What a calibrated
basis is worth is what it does better than this.
*Paper* None; `orthogonal` of the KV Plugin (mcgrof/knlp), as it is without calibration.
*Source* A description of its code; kvtailor's own code, that of `lowrank`.
*Departs* The width is that of the kv heads, where the KV Plugin reckons with the query heads; on a model of few kv
heads a rank of 128 may be all of it, and then nothing is lost and nothing is saved.
*Cost* As `lowrank`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtailor.encode.contract import Codec
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.method import Serves

__all__ = ["Orthogonal"]


@dataclass(frozen=True, kw_only=True)
class Orthogonal(LowRank, Codec):
    """Low rank in random directions; arguments that are not listed here are those of `lowrank`.

    Attributes:
        rank: directions of all heads together, at most their channels; or a share of them.
    """

    rank: int | float = 128
    heads: int = 0
    basis: Literal["calibrated", "random"] = "random"
    examples: ClassVar[tuple[str, ...]] = ("orthogonal(rank=1.0)",)
    serves: ClassVar[Serves] = Serves(
        latents="it stores keys and values in bases of their own, and a latent is both at once"
    )
