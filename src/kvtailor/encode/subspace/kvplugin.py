"""KV Plugin v9: one basis for all kv heads of a layer, fitted to the text that it was calibrated on.

*Idea* The states of all heads of a layer are taken together, their mean is taken off, and each head projects its state
on the directions of most variance, the same for all heads. bits=8 and only=values are its published setting.
*Paper* None; version 9 of the KV Plugin (mcgrof/knlp).
*Source* A description of its code; kvtailor's own code, that of `lowrank`.
*Departs* Principal directions are exact, where v9 takes two steps of a randomised method. Keys, where they are
projected, are those after the rotary embedding, as v9's. Codes and scales stay as they are, where v9 first turned them
back before it stored them.
*Cost* As `lowrank`. rank / d of the bytes of what is projected, or (rank + element) / d / element with bits=8: with
values alone never below half of the cache. See `docs/ratios.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtailor.encode.contract import Codec
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.encode.vector import Vector
from kvtailor.method import Serves

__all__ = ["KvPlugin"]


@dataclass(frozen=True, kw_only=True)
class KvPlugin(LowRank, Codec):
    """Low rank as the KV Plugin has it; arguments that are not listed here are those of `lowrank`.

    Attributes:
        rank: directions of a head, at most its channels; or a share of them if it has a decimal point.
        bits: of a coordinate, one scale for each vector of them; None: coordinates stay as they are.
    """

    rank: int | float = 0.75
    shared: bool = True
    centred: bool = True
    bits: int | None = None
    examples: ClassVar[tuple[str, ...]] = (
        "kvplugin(rank=1.0, centred=false, only=values, basis=random, bits=8)",
        "kvplugin(rank=1.0, centred=false, basis=random)",
    )
    serves: ClassVar[Serves] = Serves(
        latents="it stores keys and values in bases of their own, and a latent is both at once"
    )

    def __post_init__(self) -> None:
        if self.bits is not None:
            if self.of is not None:
                raise ValueError("kvplugin: bits and of both set how coordinates are stored: give one of them")
            # Raises the codec's own error for bits that it cannot have.
            Vector(bits=self.bits)
        super().__post_init__()

    @property
    def coordinates(self) -> Codec | None:
        return self.of if self.bits is None else Vector(bits=self.bits)
