"""Kvtc: principal components of all kv heads of a layer, each group of them in bits of its own, most of them in few.

*Idea* Channels of keys and values go together, within heads and across them, so that a few principal components have
most of the variance. Which bits each group of components gets, none among them, is found by dynamic programming: the
least squared error on calibration text in all that a budget allows. Codes of what is left over are far from evenly
spread, and an entropy coder makes their files smaller: write `+ disk(pack=deflate)`.
*Paper* `staniszewski2025kvtc` (arXiv 2511.01815): mean and principal components on calibration text, bits by dynamic
programming under a budget, DEFLATE. Its keys are those before the rotary embedding: `unrotated(of=kvtc)`.
*Source* Descriptions of the paper and its abstract (the sources are named in docs/methods/formulas.md); kvtailor's own
code. The paper's own text could not be had here.
*Departs* The paper decorrelates all layers at once, and divides its bits over all of them. Segments are a layer's, so
components are those of one layer, and each layer and side has the same budget. A plan that evicts takes each head
alone, since heads then hold other tokens. A step and a minimum belong to one component and a run of `group` tokens,
where the paper has them for a token and many components: a layer has too few of these to share them. Groups have 8
components, and any bits from 0 to 8; descriptions of the paper name 2, 4, and 8-bit floats. The newest tokens stay
plain, as published (w = 128); the first ones (s = 4) are stored as all others.
*Cost* At most bits / 8 bytes for each element with 16-bit scales. Encoding and decoding: 2 * width * components
operations for each token of a layer; values are turned back once for each query. Components are there once for all
caches and are not in the ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.encode.contract import Codec, CodecContext, Sides
from kvtailor.encode.settings import ByGroups
from kvtailor.encode.subspace.projecting import Projecting
from kvtailor.method import Serves
from kvtailor.ops.codes.components import (
    MOST_BITS,
    ComponentCodes,
    best_bits,
    bytes_of_run,
    part_distortions,
    principal_parts,
    unit_sizes,
)
from kvtailor.ops.codes.subspace import Basis, random_directions
from kvtailor.ops.segments.coded import PairSegment, Whole, alone
from kvtailor.ops.segments.latents import LatentSegment
from kvtailor.types import Layout, Segment

__all__ = ["Components", "Kvtc", "KvtcSegment"]


class KvtcSegment(LatentSegment):
    """Coordinates along principal components."""

    codec = "kvtc"


@dataclass(frozen=True, kw_only=True)
class CoordinateSegment(PairSegment):
    """The coordinates, in codes."""

    codec = "kvtc coordinates"
    kinds = (ComponentCodes, Whole)


@dataclass(frozen=True, kw_only=True, eq=False)
class Components:
    """What was measured of one layer's side, of heads that are projected together. Equal where the content is.

    Attributes:
        mean: (groups, w) float32.
        directions: (groups, w, w) as the file has them, the largest variance first.
        distortion: (ceil(w / 8), 9) of eight components and 0 to 8 bits, over all groups.
    """

    mean: Tensor
    directions: Tensor
    distortion: Tensor

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Components) and self.digest == other.digest

    @cached_property
    def digest(self) -> bytes:
        """Of the content, read once: a layer of 1,024 channels has 4 MB of it."""
        found = hashlib.sha256()
        for each in (self.mean, self.directions, self.distortion):
            found.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.digest()


@dataclass(frozen=True, kw_only=True)
class Kvtc(ByGroups, Projecting, CalibratedMethod, Codec):
    """Principal components in bits that dynamic programming chose.

    Attributes:
        file: of `kvtailor calibrate kvtc`.
        bits: the budget for each number of a key or value, steps and minima of 16 bits included; above 0, at most 8.
        key_bits: of a key's numbers, where it is to differ.
        value_bits: of a value's numbers, where it is to differ.
        heads: 0: all kv heads of a layer are decorrelated together; 1: each alone.
        group: tokens that share a component's step and minimum.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once; a multiple of `group`.
        only: what is encoded; the other side stays as it is.
        basis: "random" takes random directions and even bits, which no calibration is needed for; it is the control.
    """

    bits: float = 3.0
    key_bits: float | None = None
    value_bits: float | None = None
    heads: Literal[0, 1] = 0
    group: int = 64
    recent: int = 128
    block_size: int = 128
    only: Sides = "both"
    basis: Literal["calibrated", "random"] = "calibrated"
    calibrates: ClassVar[str] = "kvtc"
    examples: ClassVar[tuple[str, ...]] = (
        "kvtc(bits=4.0, basis=random)",
        "kvtc(bits=5.5, value_bits=5.0, heads=1, group=32, basis=random)",
        "kvtc(bits=4.0, only=values, basis=random)",
    )
    _context: CodecContext | None = field(init=False, repr=False, compare=False, default=None)
    _found: dict[tuple[str, int, int, int], Components] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    serves: ClassVar[Serves] = Serves(
        latents="it stores keys and values in bases of their own, and a latent is both at once"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bits", "key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits is not None and not 0 < bits <= MOST_BITS:
                raise ValueError(f"kvtc: {name} must be above 0 and at most {MOST_BITS}, found {bits}")
        if self.heads not in (0, 1):
            raise ValueError(f"kvtc: heads must be 0 (all of a layer together) or 1 (each alone), found {self.heads}")
        if self.group < 2:
            raise ValueError(f"kvtc: group must be 2 tokens or more, found {self.group}; 64 is usual")
        self.check_tokens("kvtc")
        self.check_groups("kvtc")

    @property
    def wants_calibration(self) -> bool:
        return self.basis == "calibrated"

    @property
    def bears_offset(self) -> bool:
        """Each component of a group of tokens has its own minimum, which takes the constant."""
        return True

    def one_sided(self, side: Sides, asked: str) -> Codec:
        if self.only not in ("both", side):
            return super().one_sided(side, asked)
        return replace(self, only=side)

    def segment_type(self) -> type[KvtcSegment]:
        return KvtcSegment

    def for_layer(self, context: CodecContext) -> Kvtc:
        made = super().for_layer(context)
        object.__setattr__(made, "_found", {})
        return made

    def ranks_of(self, joined: int, heads: int, key_size: int, value_size: int) -> tuple[int, int]:
        total = self._share.total(heads)
        keys, values = (
            _kept(self._bits("keys", joined, total, key_size), joined * key_size)[1],
            _kept(self._bits("values", joined, total, value_size), joined * value_size)[1],
        )
        return keys, values

    def basis_of(self, side: str, rank: int, joined: int, heads: int, size: int) -> Basis:
        return _basis(self._components(side, joined, heads, size), self._bits(side, joined, heads, size), joined)

    def store_latents(
        self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None, *, joined: int, sizes: tuple[int, int]
    ) -> Segment:
        # All heads of a layer are together, or each is alone.
        total = joined if joined > 1 else self._share.total(layout.heads)
        coded = []
        for side, latents, size in zip(("keys", "values"), (keys, values), sizes, strict=True):
            digits, rank = _kept(self._bits(side, joined, total, size), joined * size)
            coded.append(ComponentCodes.of(latents, digits, self.group) if rank else Whole(states=alone(latents)))
        return CoordinateSegment(layout=layout, keys=coded[0], values=coded[1])

    def restore_latents(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        return CoordinateSegment.from_state(layout, fields, tensors)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Codes and scales of a layer's components, shared by its heads, and the side that stays as it is.

        Where no calibration is known, the most that the budget allows.
        """
        heads = self._known_heads
        joined, total = self._joined(heads), self._share.total(heads)
        found = 0.0
        for side, size in (("keys", key_size), ("values", value_size)):
            if self.only not in ("both", side):
                found += size * element_size
            elif self._has_components:
                digits, rank = _kept(self._bits(side, joined, total, size), joined * size)
                found += bytes_of_run(digits, rank, self.group, element_size) / self.group / joined
            else:
                found += size * (self._budget(side) / 8 + 2 * (element_size - 2) / self.group)
        return found

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 w r for each token of a layer's w channels, and 2 for each of r coordinates; for one head of it."""
        return self._flops(tokens, key_size, value_size, ("keys", "values"))

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 w r for each key of a layer, and 2 for each coordinate; values are turned back once for each query."""
        return self._flops(tokens, key_size, value_size, ("keys",))

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """What is measured of random states."""
        return cls.example_for(layers=layers, heads=heads, group=group, size=size, value_size=size, generator=generator)

    @classmethod
    def example_for(
        cls, *, layers: int, heads: int, group: int, size: int, value_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for side, width in (("keys", size), ("unrotated", size), ("values", value_size)):
            each = []
            for _ in range(layers):
                states = torch.randn(heads, 4 * heads * width, width, generator=generator, dtype=torch.float32)
                states = states * torch.linspace(0.2, 3, width, dtype=torch.float32) + 0.5
                wide = states.double().transpose(0, 1).flatten(1)
                parts = principal_parts(wide.mT @ wide, states.double().sum(1), wide.shape[0])
                each.append({**parts, **part_distortions(states, parts, 64)})
            found |= {f"{side}_{name}": torch.stack([parts[name] for parts in each]) for name in each[0]}
        return found

    @property
    def _has_components(self) -> bool:
        return self.basis == "random" or self._measured is not None

    @property
    def _measured(self) -> Mapping[str, Tensor] | None:
        """The calibration that the layer was given, or else the plan's own file where it is for as many of each."""
        context, own = self._context, self._calibration
        if context is None or context.calibration is not None or own is None:
            return None if context is None else context.calibration
        fits = (own.shapes.layers, own.shapes.kv_heads) == (context.layers, context.heads)
        return own.tensors if fits else None

    def _budget(self, side: str) -> float:
        return (self.key_bits if side == "keys" else self.value_bits) or self.bits

    def _bits(self, side: str, joined: int, heads: int, size: int) -> tuple[int, ...]:
        """The bits of each group of components; none of a side that is not coded. `heads` are all of the layer's."""
        if self.only not in ("both", side) or not size:
            return ()
        chosen = _chosen(self._components(side, joined, heads, size), self.group, self._budget(side))
        if not any(chosen):
            raise ValueError(
                f"kvtc: {self._budget(side)} bits for each of {joined * size} channels of {side} are fewer than one "
                f"group of components takes; give more"
            )
        return chosen

    def _components(self, side: str, joined: int, heads: int, size: int) -> Components:
        context, key = self._context, (side, joined, heads, size)
        if self.basis == "random":
            drawn = 2 * (0 if context is None else context.layer) + (side == "values")
            return _drawn(heads // joined, joined, joined * size, drawn)
        measured = self._measured
        if context is None or measured is None:
            raise ValueError("kvtc: no calibration was given; call for_layer first, with the tensors of a file")
        if key not in self._found:
            name = "unrotated" if side == "keys" and context.unrotated else side
            kind, width = "alone" if joined == 1 else "together", joined * size
            mean, directions, distortion = (
                measured[f"{name}_{part}"][context.layer].cpu()
                for part in ("mean", f"{kind}_directions", f"{kind}_distortion")
            )
            with torch.inference_mode(False):
                found = Components(
                    mean=mean.float().reshape(heads // joined, width),
                    directions=directions.view(-1, width, width),
                    distortion=distortion.double(),
                )
            self._found[key] = _one_of_equals(found)
        return self._found[key]

    def _flops(self, tokens: int, key_size: int, value_size: int, turned: tuple[str, ...]) -> int:
        heads = self._known_heads
        joined = self._joined(heads)
        ranks = self.ranks_of(joined, heads, key_size, value_size)
        sides = zip(("keys", "values"), (key_size, value_size), ranks, strict=True)
        products = sum(2 * tokens * size * rank for side, size, rank in sides if side in turned)
        return products + -(-2 * tokens * sum(ranks) // joined)


@lru_cache(maxsize=512)
def _one_of_equals(components: Components) -> Components:
    """The first of all that have the same content, so that there is one for all caches."""
    return components


@lru_cache(maxsize=512)
def _chosen(components: Components, tokens: int, budget: float) -> tuple[int, ...]:
    width = components.directions.shape[-1]
    return best_bits(components.distortion, width, tokens=tokens, budget=budget)


@lru_cache(maxsize=512)
def _basis(components: Components, bits: tuple[int, ...], joined: int) -> Basis:
    with torch.inference_mode(False):
        width = components.directions.shape[-1]
        stays = torch.tensor(bits).repeat_interleave(torch.tensor(unit_sizes(width))) > 0
        return Basis(
            directions=components.directions[..., stays].float().contiguous(), mean=components.mean, joined=joined
        )


@lru_cache(maxsize=512)
def _drawn(groups: int, joined: int, width: int, state: int) -> Components:
    """Random directions, each as good as the others, of which each bit takes three quarters of the squared error."""
    drawn = random_directions(groups, joined, width, width, state, shared=False)
    with torch.inference_mode(False):
        errors = torch.tensor(
            [[count * 4.0**-bits for bits in range(MOST_BITS + 1)] for count in unit_sizes(width)], dtype=torch.float32
        )
        return Components(
            mean=torch.zeros(groups, width, dtype=torch.float32), directions=drawn.directions, distortion=errors
        )


def _kept(bits: tuple[int, ...], width: int) -> tuple[str, int]:
    """A digit for each group of components that is kept, and the number of these components."""
    kept = [(each, count) for each, count in zip(bits, unit_sizes(width), strict=False) if each]
    return "".join(str(each) for each, _ in kept), sum(count for _, count in kept)
