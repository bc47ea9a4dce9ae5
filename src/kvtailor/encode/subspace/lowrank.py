"""Low rank: keys, values or both as coordinates in a subspace of fewer directions than channels.

*Idea* States lie mostly in few directions. Those of most energy over a calibration text are found once; a token stores
its coordinates along them. Attention sums the values' coordinates and turns each sum back once, so that values are
never reconstructed token by token; keys are, when they are read.
*Paper* `chang2025palu` (arXiv 2407.21118), sections 3.1 to 3.3: heads = its group (G-LRD; 1 = M-LRD, 0 = J-LRD),
allocation = its rank search. Its keys are those before the rotary embedding: `unrotated(of=lowrank)`.
*Source* The paper, a description of its code, and one of the KV Plugin's; kvtailor's own code.
*Departs* Palu cuts the singular values of W S, where S S^T is the second moment of the layer's inputs x. As the left
singular vectors of W S are the eigenvectors of the second moment of W x, bases are made from cached states. A bias is
part of them, unless `centred` takes the mean off. Ranks are the same for all groups of a layer and side. A plan that
evicts projects each head alone, at the same share, since joined heads would have to keep the same tokens.
*Cost* rank / width of the bytes of what is projected. Encoding: 2 * width * rank operations for each token of a group;
at every step 2 * d * rank for each side of a query, but under `unrotated`, which turns all keys back at every step. The
directions, width * rank numbers for each group, are there once for all caches and are not in the ledger, as Palu's are
inside the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.encode.contract import Codec, CodecContext, Sides
from kvtailor.encode.subspace.projecting import Projecting
from kvtailor.method import Serves
from kvtailor.ops.codes.subspace import (
    Basis,
    StateMoments,
    principal,
    random_directions,
    rank_of,
    split_ranks,
)
from kvtailor.ops.segments.coded import alone
from kvtailor.types import Layout, PlainSegment, Segment

__all__ = ["LowRank"]


@dataclass(frozen=True, kw_only=True)
class LowRank(Projecting, CalibratedMethod, Codec):
    """Projection on the directions of most energy.

    Attributes:
        file: of `kvtailor calibrate lowrank`; None: the one that is shipped for the model.
        rank: directions of a group, at most its width; or a share of the width if it has a decimal point.
        heads: kv heads that are projected together, or the largest number below that divides the model's; 0: all.
        shared: all heads have the same directions, each for itself.
        centred: the mean is taken off before, and directions are those of the variance.
        only: what is projected; the other side stays as it is.
        of: the codec of the coordinates; None: they stay as they are.
        basis: "random" takes random directions, which no calibration is needed for.
        state: random state of these.
        allocation: "fisher" gives layers, and keys and values, ranks in proportion to the weights of the file, of the
            same sum.
        recent: newest tokens that stay in full precision, or more where `of` has more.
        block_size: tokens that are encoded at once where `of` has no block.
    """

    rank: int | float = 0.5
    heads: int = 1
    shared: bool = False
    centred: bool = False
    only: Sides = "both"
    of: Codec | None = None
    basis: Literal["calibrated", "random"] = "calibrated"
    state: int = 0
    allocation: Literal["uniform", "fisher"] = "uniform"
    recent: int = 0
    block_size: int = 128
    calibrates: ClassVar[str] = "lowrank"
    examples: ClassVar[tuple[str, ...]] = (
        "lowrank(rank=1.0, basis=random)",
        "lowrank(rank=1.0, heads=0, basis=random)",
        "lowrank(rank=1.0, heads=2, only=values, of=vector, basis=random)",
        "lowrank(rank=1.0, heads=0, only=keys, of=hadamard(of=kivi(bits=4, group=16, recent=16)), basis=random)",
    )
    _context: CodecContext | None = field(init=False, repr=False, compare=False, default=None)
    serves: ClassVar[Serves] = Serves(
        latents="it stores keys and values in bases of their own, and a latent is both at once"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        share = isinstance(self.rank, float)
        if not (0 < self.rank <= 1 if share else self.rank >= 1):
            raise ValueError(
                f"lowrank: rank must be 1 direction or more, or a share above 0.0 and at most 1.0, found {self.rank}"
            )
        if self.heads < 0:
            raise ValueError(f"lowrank: heads must be 1 or more, or 0 for all of a layer, found {self.heads}")
        if self.shared and self.heads != 1:
            raise ValueError(f"lowrank: shared directions are those of single heads, found heads={self.heads}")
        if self.basis == "random" and (self.centred or self.allocation == "fisher"):
            raise ValueError(
                "lowrank: centred=true and allocation=fisher read a calibration, and basis=random has none: leave them "
                "out, or take basis=calibrated"
            )
        if self.recent < 0 or self.block_size < 1:
            raise ValueError(
                f"lowrank: recent must be 0 or more tokens and block_size 1 or more, found {self.recent} and "
                f"{self.block_size}"
            )
        inner = self._latents
        if inner is not None and (inner.needs_rotation or inner.weighs_tokens):
            raise ValueError(
                "lowrank: of codes coordinates, which have no positions and cannot be merged; write "
                "unrotated(of=lowrank(...)) for keys before the rotary embedding"
            )

    @property
    def wants_calibration(self) -> bool:
        return self.basis == "calibrated"

    @property
    def coordinates(self) -> Codec | None:
        """The codec of the coordinates."""
        return self.of

    @property
    def tail(self) -> int:
        return max(self.recent, 0 if self._latents is None else self._latents.tail)

    @property
    def block(self) -> int:
        return (0 if self._latents is None else self._latents.block) or self.block_size

    @property
    def lane_multiple(self) -> int:
        return 1 if self._latents is None else self._latents.lane_multiple

    @property
    def bears_offset(self) -> bool:
        """Where keys are coded in coordinates: the mean is taken off before, or what codes those bears it."""
        codec = self.coordinates
        return self.only == "values" or self.centred or codec is None or codec.bears_offset

    def one_sided(self, side: Sides, asked: str) -> LowRank:
        of = None if self.of is None else self.of.one_sided(side, asked)
        if of is None and self.only not in ("both", side):
            super().one_sided(side, asked)
        return replace(self, of=of, only=side if self.only in ("both", side) else self.only)

    def store_latents(
        self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None, *, joined: int, sizes: tuple[int, int]
    ) -> Segment:
        codec = self._of_layer()
        if codec is None:
            return PlainSegment(layout=layout, keys=alone(keys), values=alone(values))
        return codec.encode(layout, keys, values, first)

    def restore_latents(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        codec = self._of_layer()
        return (PlainSegment.from_state if codec is None else codec.restore)(layout, fields, tensors)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """A group's latents, shared by its heads, and the side that stays as it is."""
        heads, codec = self._known_heads, self._of_layer()
        joined = self._joined(heads)
        ranks = self.ranks_of(joined, heads, key_size, value_size)
        latents = sum(ranks) * element_size if codec is None else codec.bytes_per_token(*ranks, element_size)
        whole = {"both": 0, "keys": value_size, "values": key_size}[self.only]
        return latents / joined + whole * element_size

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """2 w r for each projected token of a group of width w, and those of the inner codec; for one head of it."""
        return self._flops("encode_flops", tokens, key_size, value_size, ("keys", "values"))

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """2 w r for each key of a group, and those of the inner codec; values are turned back once for each query."""
        return self._flops("decode_flops", tokens, key_size, value_size, ("keys",))

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int | None:
        """2 d r for each side of a query, products with coordinates that are more than channels, and the inner codec's.

        What fewer coordinates than channels save of the products is not taken off.
        """
        joined, sizes = self._joined(self._known_heads), (key_size, value_size)
        ranks = self.ranks_of(joined, self._known_heads, key_size, value_size)
        own = sum(
            2 * queries * size * rank + 2 * queries * tokens * max(0, rank - size)
            for size, rank in zip(sizes, ranks, strict=True)
            if rank
        )
        if self._latents is None:
            return own
        inner = self._latents.read_flops(
            tokens=tokens, queries=queries * joined, key_size=ranks[0], value_size=ranks[1]
        )
        return None if inner is None else own + -(-inner // joined)

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Moments of random states, and random weights."""
        found: dict[str, Tensor] = {
            f"fisher_{side}": torch.rand(layers, generator=generator, dtype=torch.float32)
            for side in ("keys", "values")
        }
        for side in ("keys", "unrotated", "values"):
            each = []
            for _ in range(layers):
                states = torch.randn(4 * heads * size, heads * size, generator=generator, dtype=torch.float64)
                states = states * torch.linspace(0.2, 3, heads * size, dtype=torch.float32) + 0.5
                each.append(StateMoments.of(states.mT @ states, states.sum(0).view(heads, size), states.shape[0]))
            for name in ("mean", "deviation", "correlation"):
                found[f"{side}_{name}"] = torch.stack([getattr(moments, name) for moments in each])
        return found

    @property
    def _latents(self) -> Codec | None:
        """The codec of the coordinates, of the projected side alone where there is one."""
        codec = self.coordinates
        return codec if codec is None or self.only == "both" else codec.one_sided(self.only, "lowrank")

    def _of_layer(self) -> Codec | None:
        codec = self._latents
        return codec if codec is None or self._context is None else codec.for_layer(self._context)

    def ranks_of(self, joined: int, heads: int, key_size: int, value_size: int) -> tuple[int, int]:
        """Directions of so many joined heads' keys and values on this layer, 0 for a side that is not projected."""
        context, parts = self._context, self._group(self._share.total(heads)) // joined
        sizes = (0 if self.only == "values" else key_size, 0 if self.only == "keys" else value_size)
        widths = [joined * size for size in sizes]
        ranks = [rank_of(self.rank, width, parts) for width in widths]
        if self.allocation == "uniform" or context is None or context.calibration is None:
            return ranks[0], ranks[1]
        weights = torch.stack([context.calibration[f"fisher_{side}"].cpu() for side in ("keys", "values")])
        split = split_ranks(weights, torch.tensor(ranks), torch.tensor(widths))[:, context.layer].tolist()
        return split[0], split[1]

    def basis_of(self, side: str, rank: int, joined: int, heads: int, size: int) -> Basis:
        """The basis of a layer with so many kv heads in all."""
        context = self._context
        if self.basis == "random":
            layer = 0 if context is None else context.layer
            drawn = 2 * (self.state * 10_007 + layer) + (side == "values")
            return random_directions(heads // joined, joined, joined * size, rank, drawn, shared=self.shared)
        if context is None or context.calibration is None:
            raise ValueError("lowrank: no calibration was given; call for_layer first, with the tensors of a file")
        name = "unrotated" if side == "keys" and context.unrotated else side
        tensors = {part: context.calibration[f"{name}_{part}"] for part in ("mean", "deviation", "correlation")}
        moments = StateMoments(**{part: tensor[context.layer] for part, tensor in tensors.items()})
        return principal(moments, joined, rank, centred=self.centred, shared=self.shared)[0]

    def _flops(self, name: str, tokens: int, key_size: int, value_size: int, sides: tuple[str, ...]) -> int | None:
        heads = self._known_heads
        joined = self._joined(heads)
        ranks = self.ranks_of(joined, heads, key_size, value_size)
        turned = zip(("keys", "values"), (key_size, value_size), ranks, strict=True)
        own = sum(2 * tokens * size * rank for side, size, rank in turned if side in sides)
        if self._latents is None:
            return own
        inner: int | None = getattr(self._latents, name)(tokens=tokens, key_size=ranks[0], value_size=ranks[1])
        return None if inner is None else own + -(-inner // joined)
